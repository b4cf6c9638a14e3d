"""Models of the library transformers are read, and it reads the export."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.common import pretrained
from experiments.summarization.model import END, PAD, library_config
from experiments.summarization.pretrained import (
    load_pretrained,
    pretrained_settings,
    tokenizer_content,
)
from experiments.summarization.tokenizer import SubwordTokenizer
from raypipe.errors import ConfigError
from tests.experiments.summarization.references import (
    BOTH,
    GATED,
    PLAIN,
    batch,
    library_model,
    lively_t5,
    next_token_logits,
    transformers,
)

TEXTS = ["the cat sat on the mat", "a café in the rain", "cats and dogs"]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with the configuration of a T5, but without weights."""
    transformers.T5Config(**library_config(PLAIN)).save_pretrained(tmp_path)
    return tmp_path


def _save_tokenizer(folder: Path, **special: str) -> Tokenizer:
    """As T5 has it: padding and end are 0 and 1, and pieces of words as in SentencePiece."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    given = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"} | special
    library = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given)
    library.save_pretrained(folder)
    return library


def _same(model: Any, expected: Any) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert set(ours) == set(theirs)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, msg=name)


def _load(folder: Path) -> Any:
    return load_pretrained(str(folder), pretrained_settings(str(folder)))


@pytest.mark.parametrize(
    ("settings", "family"),
    [(GATED, "T5"), (GATED, "MT5"), (PLAIN, "T5")],
    ids=["T5 1.1", "mT5", "T5"],
)
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
def test_weights_are_those_the_library_saved(settings, family, shard, tmp_path):
    model = lively_t5(settings)
    library_model(model, settings, family).save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "4KB")
    found = pretrained_settings(str(tmp_path))
    assert found.model_copy(update={"decoder_layers": settings.decoder_layers}) == settings
    assert found.decoder_depth == settings.decoder_depth
    loaded = _load(tmp_path)
    assert loaded.training
    assert loaded.dtype == torch.float32
    _same(loaded, model)
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
    config = {
        "model_type": family, "vocab_size": 23, "d_model": 12, "d_kv": 5, "num_heads": 3,
        "d_ff": 10, "num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12, "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0, "is_encoder_decoder": True, **stored,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    _same(_load(tmp_path), model)


@BOTH
def test_an_mt5_or_t5_with_one_matrix_is_loaded_into_both(settings, tmp_path):
    """The library ties what is equal; an mT5 so saved has the same logits."""
    model = lively_t5(settings)
    if not settings.tied:
        model.lm_head.weight.data = model.shared.weight.data.clone()
    family = "T5" if settings.tied else "MT5"
    library_model(model, settings, family).save_pretrained(tmp_path)
    _same(_load(tmp_path), model)


def test_weights_that_would_be_unpickled_are_refused(plain):
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (plain / "unpickled",)

    (plain / "pytorch_model.bin").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(ConfigError, match=r"weights cannot be read: .*safetensors"):
        load_pretrained(str(plain), PLAIN)
    assert not (plain / "unpickled").exists()


def test_a_model_of_other_sizes_is_refused(tmp_path):
    library_model(lively_t5(PLAIN), PLAIN).save_pretrained(tmp_path)
    wider = PLAIN.model_copy(update={"feed_forward": 11})
    with pytest.raises(ConfigError, match="has feed_forward = 10, not 11"):
        load_pretrained(str(tmp_path), wider)
    deeper = PLAIN.model_copy(update={"decoder_layers": 3})
    with pytest.raises(ConfigError, match="has decoder_layers = 2, not 3"):
        load_pretrained(str(tmp_path), deeper)
    load_pretrained(str(tmp_path), PLAIN.model_copy(update={"dropout": 0.3}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bart"}, "is a model of type bart, neither t5 nor mt5"),
        ({"model_type": "umt5"}, "is a model of type umt5"),
        ({"feed_forward_proj": "gated-silu"}, "has the activation gated-silu; known are relu"),
        ({"decoder_start_token_id": 5}, "has decoder_start_token_id = 5; a T5 has 0"),
        ({"layer_norm_epsilon": 1e-5}, "has layer_norm_epsilon = 1e-05; a T5 has 1e-06"),
    ],
)
def test_another_architecture_is_refused(changes, message, plain):
    path = plain / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        pretrained_settings(str(plain))


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no such directory"):
        pretrained_settings(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        pretrained_settings(str(tmp_path))
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
