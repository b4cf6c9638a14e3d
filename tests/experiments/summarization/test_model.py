"""The T5 model, its loss, the texts it writes, and the tokens of documents and summaries."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.summarization import model as t5
from experiments.summarization.generation import GenerationSettings, generate
from experiments.summarization.tokenizer import Lengths as TokenLengths
from experiments.summarization.tokenizer import SubwordTokenizer, encode_pairs, make_tokenizer
from experiments.summarization.training import RandomPairs, SummarizationTask, pad
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext
from tests.experiments.references import counted_flops, parameter_count
from tests.experiments.summarization.references import (
    BOTH,
    GATED,
    batch,
    lively_t5,
    next_token_logits,
)


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


SIZE = t5.T5Settings(
    vocabulary=40, width=16, head_width=8, heads=2, feed_forward=16, layers=1, dropout=0.0
)
#: tokens of the sources and of the targets
LENGTHS = [(3, 2), (17, 5), (8, 9), (30, 3), (9, 8), (5, 12), (24, 2), (12, 4)]


DRAW = torch.Generator().manual_seed(0)
PAIRS = [
    tuple(
        F.pad(torch.randint(2, 40, (n - 1,), generator=DRAW), (0, 1), value=t5.END) for n in lengths
    )
    for lengths in LENGTHS
]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_cross_entropy_of_the_tokens_of_each_target(smoothing):
    torch.manual_seed(0)
    network = t5.build_model(SIZE).double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for source, target in PAIRS:
        before = torch.cat((torch.tensor([t5.PAD]), target[:-1]))
        mask = torch.ones(1, len(source), dtype=torch.bool)
        (logits,) = next_token_logits(network, source[None], mask, before[None])
        total += F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
        tokens += len(target)
    plain, loss = (
        SummarizationTask(SIZE, RandomPairs(40, 256, 8, 10), label_smoothing=share).loss(
            network, pad(PAIRS), StepContext(0, Phase("train", 1, 8, 1e-3), 0)
        )
        for share in (0.0, smoothing)
    )
    assert int(loss.weight) == tokens == sum(target for _, target in LENGTHS)
    torch.testing.assert_close(loss.total, total)
    if smoothing:
        torch.testing.assert_close(loss.metrics["cross_entropy"], plain.total.detach())


def test_texts_become_tokens_that_end_and_are_cut():
    texts = ["one two three four five", "six seven", "</s> is text"]
    tokenizer = pickle.loads(pickle.dumps(SubwordTokenizer(make_tokenizer(texts * 3, 300, None))))
    summaries = [["one", "two three"], ["six"], ["text"]]
    whole = encode_pairs(tokenizer, "say: ", TokenLengths(100, 100), texts, summaries)
    assert (whole.cut_sources, whole.cut_targets) == (0, 0)
    sources = whole.documents["source"].to_pylist()
    assert tokenizer.decode(sources) == [f"say: {text}" for text in texts]
    assert [ids.count(t5.END) for ids in sources] == [1, 1, 1]
    assert whole.pairs["source"].to_pylist() == [sources[0], *sources]
    targets = whole.pairs["target"].to_pylist()
    assert tokenizer.decode(targets) == ["one", "two three", "six", "text"]
    assert whole.documents["references"].to_pylist() == summaries
    assert whole.documents["text"].to_pylist() == texts
    length = len(sources[1])
    cut = encode_pairs(tokenizer, "say: ", TokenLengths(length, 2), texts, summaries)
    assert cut.cut_sources == sum(len(ids) > length for ids in sources) > 0
    assert cut.documents["source"].to_pylist()[0] == [*sources[0][: length - 1], t5.END]
    assert cut.cut_targets == sum(len(ids) > 2 for ids in targets)
    assert {len(ids) for ids in cut.pairs["target"].to_pylist()} == {2}


def test_what_is_attended_to_is_copied():
    settings = SIZE.model_copy(update={"vocabulary": 20, "width": 64, "head_width": 32})
    shares = {}
    for copying in (True, False):
        hits = 0
        for seed in range(50):
            torch.manual_seed(seed)
            task = SummarizationTask(settings, RandomPairs(20, 8, 8, 10), copying=copying)
            token = torch.tensor([[2 + seed % 18]])
            seen = torch.ones_like(token, dtype=torch.bool)
            logits = next_token_logits(task.build_model(), token, seen, torch.tensor([[t5.PAD]]))
            hits += int(logits[0, 0].argmax() == token[0, 0])
        shares[copying] = hits / 50
    assert shares[True] >= 0.65
    assert shares[False] <= 0.15


def ending(settings: t5.T5Settings, seed: int = 0) -> Any:
    """A model whose texts end now and then."""
    model = lively_t5(settings, seed)
    with torch.no_grad():
        first = model.decoder.block[0].layer[0].SelfAttention
        first.relative_attention_bias.weight.mul_(3)
        model.lm_head.weight[t5.END].mul_(1.5)
    return model


def _sources(settings: t5.T5Settings) -> tuple[Tensor, Tensor]:
    parts = [batch(settings, seed)[:2] for seed in range(4)]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([mask for _, mask in parts])


def _library_texts(model: Any, inputs: Tensor, mask: Tensor, how: GenerationSettings) -> list:
    texts = model.generate(
        input_ids=inputs, attention_mask=mask.long(), num_beams=how.beams,
        max_new_tokens=how.length, length_penalty=how.length_penalty,
        no_repeat_ngram_size=how.no_repeat_ngram, early_stopping=False, do_sample=False,
        use_cache=False, decoder_start_token_id=t5.PAD, pad_token_id=t5.PAD, eos_token_id=t5.END,
    ).tolist()  # fmt: skip
    return [[token for token in text if token not in (t5.PAD, t5.END)] for text in texts]


@BOTH
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    ("penalty", "ngram"), [(1.0, 0), (0.0, 0), (2.0, 2), (-1.0, 1), (0.6, 3), (1.0, 2)]
)
def test_texts_are_those_of_a_search_of_all_texts_without_a_cache(settings, beams, penalty, ngram):
    how = GenerationSettings(
        beams=beams, length=12, length_penalty=penalty, no_repeat_ngram=ngram, batch=5
    )
    lengths = set()
    for seed in range(2):
        model, (inputs, mask) = ending(settings, seed), _sources(settings)
        texts = generate(model, inputs, mask, how)
        assert texts == _library_texts(model, inputs, mask, how)
        lengths |= {len(text) for text in texts}
    assert len(lengths) > 2  # some end, at different lengths


def test_a_model_in_training_is_refused():
    model, (inputs, mask) = ending(GATED).train(), _sources(GATED)
    with pytest.raises(ValueError, match=r"call model\.eval"):
        generate(model, inputs, mask, GenerationSettings())
