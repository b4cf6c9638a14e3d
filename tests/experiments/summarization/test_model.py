"""The T5 model: its loss, its texts and tokens, and models of the library transformers."""

from __future__ import annotations

import json
import pickle
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from experiments.common import pretrained
from experiments.summarization import model as t5
from experiments.summarization.generation import GenerationSettings, generate
from experiments.summarization.model import END, PAD
from experiments.summarization.pretrained import (
    load_pretrained,
    pretrained_settings,
    tokenizer_content,
)
from experiments.summarization.tokenizer import Lengths as TokenLengths
from experiments.summarization.tokenizer import SubwordTokenizer, encode_pairs, make_tokenizer
from experiments.summarization.training import RandomPairs, SummarizationTask, pad
from raypipe.errors import ConfigError
from tests.experiments.references import STEP, counted_flops, lively, parameter_count
from tests.scenario import cases

if find_spec("transformers") is None:  # slow to import, in all processes of a run
    pytest.skip("needs the extra nlp", allow_module_level=True)

#: as T5 1.1 and mT5
GATED = t5.T5Settings(
    vocabulary=23, width=12, head_width=5, heads=3, feed_forward=10, layers=2, decoder_layers=3,
    relative_buckets=8, relative_distance=12, gated=True, tied=False, dropout=0.0,
)  # fmt: skip
#: as T5
PLAIN = GATED.model_copy(update={"gated": False, "tied": True, "decoder_layers": None})
BOTH = pytest.mark.parametrize("settings", [GATED, PLAIN], ids=["gated-untied", "relu-tied"])


def lively_t5(settings: t5.T5Settings, seed: int = 0) -> Any:
    """A model whose every part shows in the logits."""
    torch.manual_seed(seed)
    return lively(t5.build_model(settings).eval(), 0.3)


def batch(settings: t5.T5Settings, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``[3, 14]`` padded at their end, at their start and not at all, mask, targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(2, settings.vocabulary, (3, 14), generator=generator)
    mask = torch.ones_like(inputs, dtype=torch.bool)
    mask[0, 9:] = False
    mask[1, :6] = False
    targets = torch.randint(2, settings.vocabulary, (3, 16), generator=generator)
    return inputs.where(mask, 0), mask, targets


def next_token_logits(model, inputs, mask, decoder_inputs) -> Tensor:
    """Logits ``[B, T, V]`` of the token after each of ``decoder_inputs``, by the library."""
    given = {"input_ids": inputs, "attention_mask": mask, "decoder_input_ids": decoder_inputs}
    return model(**given, use_cache=False).logits


@BOTH
def test_flops_are_those_that_pytorch_counts(settings):
    model, given = t5.build_model(settings), batch(settings)
    found = counted_flops(lambda: next_token_logits(model, *given).sum().backward())
    assert found == 3 * t5.flops_per_sample(settings, 14, 16)


def test_the_sizes_are_those_of_the_workload():
    found = [
        parameter_count(t5.build_model, size) for size in (t5.t5_220m(), t5.mt5_1_2b(), t5.small())
    ]
    assert found[:2] == [222_903_552, 1_229_581_312]  # as t5-base, as google/mt5-large
    assert found[2] < 2e6


#: tokens of the sources and of the targets
LENGTHS = [(3, 2), (17, 5), (8, 9), (30, 3), (9, 8), (5, 12), (24, 2), (12, 4)]


@BOTH
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_cross_entropy_of_the_tokens_of_each_target(settings, smoothing):
    torch.manual_seed(0)
    network = t5.build_model(settings).double()
    pairs = [
        tuple(F.pad(torch.randint(2, 23, (length - 1,)), (0, 1), value=END) for length in lengths)
        for lengths in LENGTHS
    ]
    total = plain = 0.0
    for source, target in pairs:
        before = torch.cat((torch.tensor([PAD]), target[:-1]))
        mask = torch.ones(1, len(source), dtype=torch.bool)
        (logits,) = next_token_logits(network, source[None], mask, before[None])
        plain += F.cross_entropy(logits, target, reduction="sum")
        total += F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
    task = SummarizationTask(settings, RandomPairs(23, 256, 8, 10), label_smoothing=smoothing)
    loss = task.loss(network, pad(pairs), STEP)
    assert int(loss.weight) == sum(target for _, target in LENGTHS)
    torch.testing.assert_close(loss.total, total)
    if smoothing:
        torch.testing.assert_close(loss.metrics["cross_entropy"], plain.detach())


def test_texts_become_tokens_that_end_and_are_cut():
    texts = ["one two three four five", "six seven", "</s> is text"]
    tokenizer = pickle.loads(pickle.dumps(SubwordTokenizer(make_tokenizer(texts * 3, 300, None))))
    summaries = [["one", "two three"], ["six"], ["text"]]
    whole = encode_pairs(tokenizer, "say: ", TokenLengths(100, 100), texts, summaries)
    assert (whole.cut_sources, whole.cut_targets) == (0, 0)
    sources = whole.documents["source"].to_pylist()
    assert tokenizer.decode(sources) == [f"say: {text}" for text in texts]
    assert [ids.count(END) for ids in sources] == [1, 1, 1]
    assert whole.pairs["source"].to_pylist() == [sources[0], *sources]
    targets = whole.pairs["target"].to_pylist()
    assert tokenizer.decode(targets) == ["one", "two three", "six", "text"]
    assert whole.documents["references"].to_pylist() == summaries
    assert whole.documents["text"].to_pylist() == texts
    length = len(sources[1])
    cut = encode_pairs(tokenizer, "say: ", TokenLengths(length, 2), texts, summaries)
    assert cut.cut_sources == sum(len(ids) > length for ids in sources) > 0
    assert cut.documents["source"].to_pylist()[0] == [*sources[0][: length - 1], END]
    assert cut.cut_targets == sum(len(ids) > 2 for ids in targets)
    assert {len(ids) for ids in cut.pairs["target"].to_pylist()} == {2}


def test_what_is_attended_to_is_copied():
    settings = t5.T5Settings(
        vocabulary=20, width=64, head_width=32, heads=2, feed_forward=16, layers=1, dropout=0.0
    )
    hits = {True: 0, False: 0}
    for copying, seed in product(hits, range(25)):
        torch.manual_seed(seed)
        task = SummarizationTask(settings, RandomPairs(20, 8, 8, 10), copying=copying)
        token = torch.tensor([[2 + seed % 18]])
        seen = torch.ones_like(token, dtype=torch.bool)
        logits = next_token_logits(task.build_model(), token, seen, torch.tensor([[PAD]]))
        hits[copying] += int(logits[0, 0].argmax() == token[0, 0])
    assert hits[True] / 25 >= 0.65
    assert hits[False] / 25 <= 0.15


@BOTH
@pytest.mark.parametrize(
    ("beams", "penalty", "ngram"),
    [(1, 1.0, 0), (1, 1.0, 2), (4, 1.0, 0), (4, 0.0, 0), (4, 2.0, 2), (4, -1.0, 1), (4, 0.6, 3)],
)
def test_texts_are_those_of_a_search_of_all_texts_without_a_cache(settings, beams, penalty, ngram):
    how = GenerationSettings(
        beams=beams, length=12, length_penalty=penalty, no_repeat_ngram=ngram, batch=5
    )
    parts, lengths = [batch(settings, seed)[:2] for seed in range(4)], set()
    inputs, mask = map(torch.cat, zip(*parts, strict=True))
    for seed in range(2):
        model = lively_t5(settings, seed)
        with torch.no_grad():  # so that texts end now and then
            first = model.decoder.block[0].layer[0].SelfAttention
            first.relative_attention_bias.weight.mul_(3)
            model.lm_head.weight[END].mul_(1.5)
        expected = model.generate(
            input_ids=inputs, attention_mask=mask.long(), num_beams=beams, max_new_tokens=12,
            length_penalty=penalty, no_repeat_ngram_size=ngram, early_stopping=False,
            do_sample=False, use_cache=False, **t5.SPECIAL_TOKENS,
        )  # fmt: skip
        texts = generate(model, inputs, mask, how)
        assert texts == [[t for t in text if t not in (PAD, END)] for text in expected.tolist()]
        lengths |= {len(text) for text in texts}
    assert len(lengths) > 2  # some end, at different lengths


def test_a_model_in_training_is_refused():
    with pytest.raises(ValueError, match=r"call model\.eval"):
        generate(lively_t5(GATED).train(), *batch(GATED)[:2], GenerationSettings())


TEXTS = ["the cat sat on the mat", "a café in the rain", "cats and dogs"]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with the configuration of a T5, but without weights."""
    from transformers import T5Config

    T5Config(**t5.library_config(PLAIN)).save_pretrained(tmp_path)
    return tmp_path


def save_by_library(model: Any, settings: t5.T5Settings, folder: Path, family: str) -> None:
    """Save the same weights from a model that ``transformers`` alone built, a T5 or an MT5."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**t5.library_config(settings))
    reference = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    if not settings.tied:  # some versions tie them all
        weight = reference.lm_head.weight
        reference.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    reference.load_state_dict({name: value.detach() for name, value in parameters.items()})
    reference.save_pretrained(folder)


def _save_tokenizer(folder: Path, **special: str) -> Tokenizer:
    """As T5 has it: padding and end are 0 and 1, and pieces of words as in SentencePiece."""
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "\u2581the", "at", *sorted({"\u2581", *"".join(TEXTS)})]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    given = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"} | special
    library = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given)
    library.save_pretrained(folder)
    return library


def _load(folder: Path) -> Any:
    return load_pretrained(str(folder), pretrained_settings(str(folder)))


@pytest.mark.parametrize(
    ("settings", "family", "one_matrix"),
    [(GATED, "T5", False), (GATED, "MT5", False), (GATED, "MT5", True), (PLAIN, "T5", True)],
    ids=["T5 1.1", "mT5", "mT5 with one matrix", "T5"],
)
def test_weights_are_those_the_library_saved(settings, family, one_matrix, tmp_path):
    """It ties what is equal; an mT5 so saved has the same logits."""
    model = lively_t5(settings)
    if one_matrix:
        model.lm_head.weight.data = model.shared.weight.data.clone()
    save_by_library(model, settings, tmp_path, family)
    found = pretrained_settings(str(tmp_path))
    assert found.model_copy(update={"decoder_layers": settings.decoder_layers}) == settings
    assert found.decoder_depth == settings.decoder_depth
    loaded = _load(tmp_path)
    assert loaded.training
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    given = batch(settings)
    expected = next_token_logits(model, *given)
    torch.testing.assert_close(next_token_logits(loaded.eval(), *given), expected)


@pytest.mark.parametrize(
    ("family", "stored"), [("mt5", {}), ("t5", {"tie_word_embeddings": False})]
)
def test_files_as_they_lie_on_the_hub_are_read(family, stored, tmp_path):
    """The configuration of T5 1.1 and mT5, by their published keys alone."""
    model = lively_t5(GATED)
    tensors = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {**cases(__file__, "hub"), "model_type": family, **stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(_load(tmp_path).state_dict(), model.state_dict())


def test_weights_that_would_be_unpickled_are_refused(plain):
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (plain / "unpickled",)

    (plain / "pytorch_model.bin").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(ConfigError, match=r"weights cannot be read: .*safetensors"):
        load_pretrained(str(plain), PLAIN)
    assert not (plain / "unpickled").exists()


def test_a_model_of_other_sizes_is_refused(tmp_path):
    save_by_library(lively_t5(PLAIN), PLAIN, tmp_path, "T5")
    deeper = PLAIN.model_copy(update={"decoder_layers": 3})
    with pytest.raises(ConfigError, match="has decoder_layers = 2, not 3"):
        load_pretrained(str(tmp_path), deeper)
    load_pretrained(str(tmp_path), PLAIN.model_copy(update={"dropout": 0.3}))


@pytest.mark.parametrize(("changes", "message"), cases(__file__, "architectures"))
def test_another_architecture_is_refused(changes, message, plain):
    path = plain / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        pretrained_settings(str(plain))


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="its configuration cannot be read"):
        pretrained_settings(str(tmp_path))
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    for function in (pretrained_settings, tokenizer_content):
        with pytest.raises(ConfigError, match="needs transformers"):
            function("google-t5/t5-small")


def test_texts_are_encoded_and_decoded_as_by_the_library(plain):
    library = _save_tokenizer(plain)
    tokenizer = SubwordTokenizer(tokenizer_content(str(plain)))
    ids = tokenizer.encode(TEXTS)
    assert ids == library(TEXTS, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([[PAD, *each, END, PAD] for each in ids]) == TEXTS
    assert tokenizer.decode([[]]) == [""]


def test_a_tokenizer_of_another_kind_is_refused(plain):
    with pytest.raises(
        ConfigError, match=r"no fast tokenizer; take a model with a tokenizer\.json"
    ):
        tokenizer_content(str(plain))
    _save_tokenizer(plain, eos_token="<unk>")
    with pytest.raises(ConfigError, match="pads with 0 and ends a text with 2"):
        tokenizer_content(str(plain))
