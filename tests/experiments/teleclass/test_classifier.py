"""The classifier, from scratch and of pretrained weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from experiments.teleclass.training_set import make_tokenizer, token_lists
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.teleclass.classifier import (
    PretrainedClassifier,
    ScratchClassifier,
    blocks_of,
    build_classifier,
    flops_of,
    metadata_of,
    restore_classifier,
)
from experiments.teleclass.settings import ClassifierSettings
from experiments.teleclass.training import Collate
from raypipe.errors import ConfigError

SCRATCH = ClassifierSettings(vocabulary=512, length=24, hidden=16, layers=2, heads=2, dropout=0)


@pytest.fixture(params=["scratch", "mean", "cls"])
def settings(request):
    if request.param == "scratch":
        return SCRATCH
    folder = request.getfixturevalue("tiny_bert")
    return SCRATCH.model_copy(update={"pretrained": folder, "pooling": request.param})


def samples(count: int = 6) -> list:
    draw = np.random.default_rng(0)
    lengths = [1, 3, 24, *draw.integers(1, 25, count - 3)]
    return [
        (draw.integers(1, 512, n, dtype=np.int32), draw.integers(0, 5, 2, dtype=np.int32))
        for n in lengths
    ]


def test_logits_do_not_depend_on_the_padding(settings):
    torch.manual_seed(0)
    model = build_classifier(settings, 5).eval()
    batch = samples()
    with torch.inference_mode():
        together = model(*Collate(5)(batch)[:2])
        alone = torch.cat([model(*Collate(5)([sample])[:2]) for sample in batch])
    assert together.shape == (6, 5)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert (together[1:] - together[:1]).abs().max() > 1e-3


def test_a_restored_classifier_gives_the_same_logits(settings):
    torch.manual_seed(0)
    model = build_classifier(settings, 5).eval()
    for parameter in model.parameters():  # as training would
        torch.nn.init.normal_(parameter, std=0.1)
    restored = restore_classifier(model.state_dict(), metadata_of(settings, 5))
    assert not restored.training
    ids, lengths, _ = Collate(5)(samples())
    with torch.inference_mode():
        torch.testing.assert_close(restored(ids, lengths), model(ids, lengths), atol=0, rtol=0)


def test_restoring_reads_nothing_but_weights_and_metadata(tiny_bert, monkeypatch):
    settings = SCRATCH.model_copy(update={"pretrained": tiny_bert})
    model, about = build_classifier(settings, 5), metadata_of(settings, 5)
    moved = about["classifier"].replace(tiny_bert, "/nowhere")
    assert isinstance(
        restore_classifier(model.state_dict(), about | {"classifier": moved}), PretrainedClassifier
    )


@pytest.mark.parametrize("classes", [1, 5])
def test_every_parameter_has_a_gradient(settings, classes):
    model = build_classifier(settings, classes)
    ids, lengths, _ = Collate(5)(samples())
    model(ids, lengths).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_count_of_operations_is_that_of_torch(settings):
    wide = settings.model_copy(update={"hidden": 64, "heads": 4})
    model = build_classifier(wide, 5).eval()
    ids = torch.randint(1, 512, (1, wide.length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, torch.tensor([wide.length]))
    assert flops_of(model, wide, 5) == pytest.approx(3 * counter.get_total_flops(), rel=0.1)


def test_the_blocks_are_the_encoder_layers(settings):
    model = build_classifier(settings, 5)
    blocks = list(blocks_of(model))
    assert len(blocks) == 2
    assert isinstance(model, ScratchClassifier) == (settings.pretrained is None)
    of_blocks = sum(p.numel() for block in blocks for p in block.parameters())
    assert of_blocks > 2 * 4 * 16 * 16


def test_half_precision_weights_become_single_precision(tiny_bert, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(tiny_bert).half().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    settings = SCRATCH.model_copy(update={"pretrained": str(tmp_path)})
    model = build_classifier(settings, 5).eval()
    restored = restore_classifier(model.state_dict(), metadata_of(settings, 5))
    for each in (model, restored):
        assert {p.dtype for p in each.parameters()} == {torch.float32}
    ids, lengths, _ = Collate(5)(samples())
    torch.testing.assert_close(restored(ids, lengths), model(ids, lengths), atol=0, rtol=0)


def test_the_tokenizer_is_that_of_the_pretrained_model(tiny_bert):
    from transformers import AutoTokenizer

    settings = SCRATCH.model_copy(update={"pretrained": tiny_bert, "length": 6})
    texts = ["a b c", "a b c d e f g h", ""]
    found = token_lists(make_tokenizer([], settings), texts).to_pylist()
    loaded = AutoTokenizer.from_pretrained(tiny_bert)
    assert found == [loaded(text, truncation=True, max_length=6)["input_ids"] for text in texts]
    assert [len(each) for each in found] == [5, 6, 2]
    with pytest.raises(ConfigError, match=r"length = 41: .* reads at most 40 tokens"):
        make_tokenizer([], settings.model_copy(update={"length": 41}))
