"""Compiled blocks, and what gradient checkpointing computes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import Regression, job
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.training import model
from raypipe.training.failure_kinds import failure_kind, unit_error
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.task import Loss, StepContext


class Deep(Regression):
    """With four equal blocks, called in a loop."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)

    def build_model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
        return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(5, 1)})

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], context: StepContext) -> Loss:
        return super().loss(lambda x: _forward(model, x), batch, context)  # type: ignore[arg-type]

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield from model["blocks"]  # type: ignore[index]


def _forward(model: Any, x: Tensor) -> Tensor:
    for block in model["blocks"]:
        x = block(x)
    return model["head"](x)  # type: ignore[no-any-return]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GraphModule]]:
    """The graphs that torch.compile makes, which are not compiled further."""
    made: list[GraphModule] = []
    real = torch.compile

    def keep(graph: GraphModule, inputs: list[Tensor]) -> GraphModule:
        made.append(graph)
        return graph

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return real(function, backend=keep)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compiled)
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", [False, True])
def test_equal_blocks_are_compiled_once(
    tmp_path: Path, graphs: list[GraphModule], recompute: bool
) -> None:
    results = []
    context = StepContext(0, Phase("train", 1, 8, 0.1), 0)
    task = Deep()
    points = task.build_dataset()
    batch = torch.utils.data.default_collate([points[i] for i in range(8)])
    for compile in (False, True):
        asked = job(task, tmp_path, compile=compile, gradient_checkpointing=recompute)
        built, module, function = model.build(asked, Worker(0, torch.device("cpu")), print)
        loss = module(function, batch, context)
        loss.total.backward()
        results.append([loss.total, *(each.grad for each in built.parameters())])
    assert all(map(torch.equal, *results))
    code = [graph.code for graph in graphs]
    # of the first block, whose input has no gradient, and of the three others
    assert len([each for each in code if "tanh" in each or "checkpoint" in each]) == 2
    assert len(code) == 4  # and of the loss before and after the blocks


def test_what_cannot_be_compiled_is_told_from_errors_of_the_code() -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler found")

    def wrong(x: Tensor) -> Tensor:
        raise ValueError("not this one")

    with pytest.raises(Exception, match="no compiler") as caught:
        torch.compile(lambda x: x + 1, backend=refuse)(torch.ones(2))
    failure = unit_error("fit", caught.value)
    assert failure.kind == "compile_error"
    assert failure.message.count("\n") == 0
    assert "no compiler found" in failure.message
    with pytest.raises(ValueError, match="not this") as own:
        torch.compile(wrong, backend="eager")(torch.ones(2))
    assert failure_kind(own.value) == "error"


class Counted(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.calls[operation.overloadpacket.__name__] += 1
        return operation(*arguments, **(named or {}))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(scaled_dot_product_attention(x, x, x))


def calls(block: nn.Module, shape: tuple[int, ...], what: Any) -> Counter[str]:
    """Return the operations of a step with recomputation."""
    model.recompute_blocks([block], what)
    with Counted() as counted:
        block(torch.randn(*shape, requires_grad=True)).sum().backward()
    return counted.calls


@pytest.mark.parametrize(
    ("build", "shape", "kept", "count"),
    [
        (lambda: nn.Sequential(nn.Conv1d(2, 2, 3), nn.SiLU(), nn.Conv1d(2, 2, 3)), (1, 2, 8),
         "convolution", 2),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SiLU()), (3, 2), "addmm", 1),
        (Attention, (1, 2, 4, 8), "_scaled_dot_product_flash_attention_for_cpu", 1),
    ],
)  # fmt: skip
def test_products_convolutions_and_attention_are_computed_once(
    build: Any, shape: tuple[int, ...], kept: str, count: int
) -> None:
    cheap, everything = (calls(build(), shape, what) for what in ("cheap", "all"))
    assert cheap[kept] == count < everything[kept]
    assert cheap["silu"] == everything["silu"]


def test_torch_refuses_an_activation_in_place_after_a_kept_product() -> None:
    with pytest.raises(RuntimeError, match="selective activation checkpoint has been mutated"):
        calls(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), (3, 2), "cheap")
