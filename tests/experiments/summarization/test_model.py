from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.summarization import model as module
from experiments.summarization.dataset import RandomPairs
from experiments.summarization.model import (
    PAD,
    T5Settings,
    build_model,
    flops_per_sample,
    mt5_1_2b,
    next_token_logits,
    next_token_states,
    small,
    t5_220m,
)
from experiments.summarization.training import SummarizationTask
from raypipe.errors import ConfigError
from tests.experiments.summarization.references import BOTH, GATED, PLAIN, batch, lively


def _decoder_inputs(targets: Tensor) -> Tensor:
    return F.pad(targets[:, :-1], (1, 0), value=PAD)


def _parameters(settings: T5Settings) -> int:
    with torch.device("meta"):
        model = build_model(settings)
    return sum(parameter.numel() for parameter in model.parameters())


def _loss(model: Any, settings: T5Settings) -> Tensor:
    inputs, mask, targets = batch(settings)
    logits = next_token_logits(model, inputs, mask, _decoder_inputs(targets))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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


def test_a_source_without_a_token_gives_numbers() -> None:
    model, (inputs, mask, targets) = lively(PLAIN), batch(PLAIN)
    assert next_token_logits(model, inputs, mask & False, targets).isfinite().all()


@BOTH
def test_bfloat16_stays_finite_and_close(settings: T5Settings) -> None:
    torch.manual_seed(0)
    model, (inputs, mask, targets) = build_model(settings), batch(settings)
    exact = next_token_logits(model, inputs, mask, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = next_token_logits(model, inputs, mask, targets)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.1 * exact.std().item())
    rounded.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@BOTH
def test_gradients_with_recomputed_layers_are_equal(settings: T5Settings) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    settings = settings.model_copy(update={"dropout": 0.2})
    gradients = []
    for recompute in (False, True):
        model = lively(settings).train()
        if recompute:
            apply_activation_checkpointing(model, check_fn=set(_blocks(model)).__contains__)
        torch.manual_seed(5)
        _loss(model, settings).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_blocks_are_the_layers_of_both_stacks() -> None:
    model = build_model(GATED)
    blocks = _blocks(model)
    assert len(blocks) == 2 + 3
    assert sum(len(block.layer) == 3 for block in blocks) == 3  # with cross-attention
    inside = {parameter for block in blocks for parameter in block.parameters()}
    outside = {n for n, parameter in model.named_parameters() if parameter not in inside}
    norms = {f"{stack}.final_layer_norm.weight" for stack in ("encoder", "decoder")}
    assert outside == {"shared.weight", "lm_head.weight", *norms}


@BOTH
def test_one_graph_holds_the_whole_model(settings: T5Settings) -> None:
    torch.compiler.reset()
    model, (inputs, mask, targets) = lively(settings), batch(settings)
    compiled = torch.compile(next_token_states, fullgraph=True, backend="eager")
    logits = compiled(model, inputs, mask, targets) @ model.lm_head.weight.T
    torch.testing.assert_close(logits, next_token_logits(model, inputs, mask, targets))


def test_two_graphs_serve_all_lengths() -> None:
    """One of the first length, one of any."""
    torch.compiler.reset()
    model = lively(GATED.model_copy(update={"layers": 1, "decoder_layers": 1}))
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    inputs, mask, targets = batch(GATED)
    for source, target in ((14, 16), (9, 12), (12, 5), (7, 7)):
        given = inputs[:, :source], mask[:, :source], targets[:, :target]
        torch.testing.assert_close(
            next_token_logits(compiled, *given), next_token_logits(model, *given)
        )
    assert graphs.frame_count == 2


@BOTH
def test_flops_are_those_that_pytorch_counts(settings: T5Settings) -> None:
    """With the attention as plain products; fused kernels count what they compute twice."""
    model, (inputs, mask, targets) = build_model(settings), batch(settings)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_logits(model, inputs, mask, targets).sum().backward()
    assert counter.get_total_flops() == 3 * flops_per_sample(settings, 14, 16)


def test_flops_of_long_texts_are_six_a_weight_and_token() -> None:
    s = t5_220m()
    layer = 4 * s.width**2 + 2 * s.width * s.feed_forward
    attention = 12 * 12 * 512 * 768 * (512 + 128 + 128 * 128 / 512)
    weights = 12 * (layer * 512 + (layer + 2 * s.width**2) * 128 + 2 * s.width**2 * 512)
    expected = 6 * (weights + 128 * s.vocabulary * s.width) + attention
    assert flops_per_sample(s, 512, 128) == expected


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


@pytest.mark.parametrize("tied", [False, True])
def test_logits_start_around_one(tied: bool) -> None:
    torch.manual_seed(0)
    settings = small().model_copy(update={"tied": tied})
    model, (inputs, mask, targets) = build_model(settings).eval(), batch(settings)
    assert 0.3 < next_token_logits(model, inputs, mask, targets).std() < 3


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
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    message = r"transformers is not installed; pip install 'raypipe-runner\[nlp\]'"
    with pytest.raises(ConfigError, match=message):
        build_model(GATED)


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("experiments.summarization.experiment", "transformers"),
        ("experiments.summarization.pretrained", "transformers"),
        ("experiments.summarization.tokenizer", "torch"),
        ("experiments.summarization.model", "torch"),
    ],
)
def test_a_heavy_library_is_imported_only_when_used(imported: str, absent: str) -> None:
    code = f"import sys, {imported}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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
