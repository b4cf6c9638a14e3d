"""Compiled blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import Regression, job
from torch import Tensor, nn
from torch.fx import GraphModule

from raypipe.training import model
from raypipe.training.failure_kinds import failure_kind, unit_error
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext


class Deep(Regression):
    """With four equal blocks, called in a loop."""

    def build_model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(5, 1))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())[:-1]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GraphModule]]:
    """The graphs that torch.compile makes, which are not compiled further."""
    made: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: list[Tensor]) -> GraphModule:
        made.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", [False, True])
def test_equal_blocks_are_compiled_once(
    tmp_path: Path, graphs: list[GraphModule], recompute: bool
) -> None:
    results = []
    context = StepContext(0, Phase("train", 1, 8, 0.1), 0)
    task = Deep(dtype=torch.float32)
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
    type_, cause = "torch._dynamo.exc.BackendCompilerFailed", "RuntimeError: no compiler found"
    assert failure.message == f"{type_}: backend='refuse' raised: {cause}"
    with pytest.raises(ValueError, match="not this") as own:
        torch.compile(wrong, backend="eager")(torch.ones(2))
    assert failure_kind(own.value) == "error"
