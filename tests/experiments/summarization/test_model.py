from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.common import pretrained
from experiments.summarization.model import (
    PAD,
    T5Settings,
    build_model,
    flops_per_sample,
    mt5_1_2b,
    next_token_logits,
    small,
    t5_220m,
)
from experiments.summarization.training import RandomPairs, SummarizationTask
from raypipe.errors import ConfigError
from tests.experiments.summarization.references import BOTH, GATED, PLAIN, batch, lively


def _decoder_inputs(targets: Tensor) -> Tensor:
    return F.pad(targets[:, :-1], (1, 0), value=PAD)


def _parameters(settings: T5Settings) -> int:
    with torch.device("meta"):
        model = build_model(settings)
    return sum(parameter.numel() for parameter in model.parameters())


def _blocks(model: Any) -> list[Any]:
    return [*SummarizationTask(GATED, RandomPairs(23, 8, 8, 1)).blocks(model)]


@BOTH
def test_padding_of_the_source_changes_nothing(settings: T5Settings) -> None:
    model, (inputs, mask, targets) = lively(settings), batch(settings)
    decoder_inputs = _decoder_inputs(targets)
    logits = next_token_logits(model, inputs, mask, decoder_inputs)
    for row in range(len(inputs)):
        alone = inputs[row : row + 1, mask[row]]
        whole = torch.ones_like(alone, dtype=torch.bool)
        expected = next_token_logits(model, alone, whole, decoder_inputs[row : row + 1])[0]
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
    other = inputs.where(mask, 7)
    torch.testing.assert_close(next_token_logits(model, other, mask, decoder_inputs), logits)


def test_a_token_changes_no_logit_before_it_and_those_from_it_on() -> None:
    model, (inputs, mask, targets) = lively(GATED), batch(GATED)
    logits = next_token_logits(model, inputs, mask, targets)
    for changed in (1, 8, 15):
        other = targets.clone()
        other[:, changed] = 2 + (other[:, changed] - 1) % (GATED.vocabulary - 2)
        difference = (next_token_logits(model, inputs, mask, other) - logits).abs().amax((0, 2))
        assert (difference[:changed] < 1e-12).all()
        assert (difference[changed:] > 1e-6).all()


@BOTH
def test_flops_are_those_that_pytorch_counts(settings: T5Settings) -> None:
    """With the attention as plain products; fused kernels count what they compute twice."""
    model, (inputs, mask, targets) = build_model(settings), batch(settings)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_logits(model, inputs, mask, targets).sum().backward()
    assert counter.get_total_flops() == 3 * flops_per_sample(settings, 14, 16)


def test_the_sizes_are_those_of_the_workload() -> None:
    assert _parameters(t5_220m()) == 222_903_552  # what t5-base has in transformers
    assert _parameters(mt5_1_2b()) == 1_229_581_312  # as google/mt5-large
    assert _parameters(small()) < 2e6


def test_the_initial_weights_are_those_of_t5() -> None:
    torch.manual_seed(0)
    settings = T5Settings(layers=3, tied=False, head_width=16, feed_forward=600)
    for name, parameter in build_model(settings).named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        std = 128**-0.5
        if name == "shared.weight":
            std = 1.0
        elif name.endswith(".q.weight"):
            std = (128 * 16) ** -0.5
        elif name.endswith(".o.weight"):
            std = 64**-0.5
        elif name.endswith(".wo.weight"):
            std = 600**-0.5
        near = 0.3 if name.endswith("bias.weight") else 0.03
        assert parameter.std().item() == pytest.approx(std, rel=near), name


def test_tied_weights_are_one_matrix() -> None:
    assert "lm_head.weight" not in build_model(PLAIN).state_dict()
    untied = PLAIN.model_copy(update={"tied": False})
    assert _parameters(untied) - _parameters(PLAIN) == PLAIN.vocabulary * PLAIN.width


@BOTH
def test_a_state_has_each_weight_once_and_is_loaded_whole(settings: T5Settings) -> None:
    model, other = lively(settings), lively(settings, seed=1)
    state = model.state_dict()
    assert set(state) == {name for name, _ in model.named_parameters()}
    save(state)  # refuses weights that share memory
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    for name, value in model.named_parameters(remove_duplicate=False):
        assert torch.equal(other.get_parameter(name), value), name
    for name in state:
        incomplete = {other: value for other, value in state.items() if other != name}
        with pytest.raises(RuntimeError, match="Missing key"):
            other.load_state_dict(incomplete)


def test_a_missing_library_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    message = r"needs transformers; pip install 'raypipe-runner\[nlp\]'"
    with pytest.raises(ConfigError, match=message):
        build_model(GATED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_distance": 4}, "relative_distance=4 must be more than half of"),
        ({"relative_buckets": 7}, "multiple of 2"),
        ({"vocabulary": 1}, "greater than or equal to 2"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_settings_that_make_no_model_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        T5Settings.model_validate(GATED.model_dump() | changes)
