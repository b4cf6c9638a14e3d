"""Cross-entropy in chunks: value and gradients of the plain one, without all logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.common import cross_entropy
from experiments.common.cross_entropy import linear_cross_entropies, linear_cross_entropy

ROWS, WIDTH, CLASSES = 50, 8, 30
Loss = Callable[[Tensor, Tensor], Tensor]


def drawn(dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a matrix and targets, of which every fifth is to be ignored."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, (rows,), generator=generator)
    targets[::5] = 3
    return hidden.to(dtype), weight.to(dtype), targets


def with_gradients(loss: Loss, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    """The loss, and the gradients of a multiple of it."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = loss(hidden, weight)
    (total * 0.3).backward()
    return [total.detach(), hidden.grad, weight.grad]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


def plain(targets: Tensor, **options: Any) -> Loss:
    return lambda hidden, weight: F.cross_entropy(
        F.linear(hidden, weight), targets, reduction="sum", **options
    )


def chunked(targets: Tensor, rows: int = 20, **options: Any) -> Loss:
    """The loss in chunks of so many rows."""
    return lambda hidden, weight: linear_cross_entropy(
        hidden, weight, targets, chunk=rows * CLASSES, **options
    )


@pytest.mark.parametrize("options", [{}, {"ignore_index": 3}, {"label_smoothing": 0.2},
                                     {"ignore_index": 3, "label_smoothing": 0.2}])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 7, 25, ROWS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_it_is_the_plain_loss_in_any_chunks(dtype, tolerance, rows, options):
    hidden, weight, targets = drawn(dtype)
    found = with_gradients(chunked(targets, rows, **options), hidden, weight)
    assert {each.dtype for each in found} == {dtype}
    exact = with_gradients(plain(targets, **options), hidden.double(), weight.double())
    assert_close(found, exact, tolerance)


def test_the_value_without_smoothing_has_no_gradients_and_in_an_evaluation_none_has():
    hidden, weight, targets = drawn(torch.float64)
    smoothed, value = linear_cross_entropies(
        hidden, weight.requires_grad_(), targets, ignore_index=3, label_smoothing=0.2, chunk=200
    )
    torch.testing.assert_close(value, plain(targets, ignore_index=3)(hidden, weight).detach())
    assert smoothed.requires_grad
    assert not value.requires_grad
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, targets)
    assert not found.requires_grad
    torch.testing.assert_close(found, plain(targets)(hidden, weight).detach())


@pytest.mark.parametrize("ignored", [False, True])
def test_without_a_target_the_loss_and_its_gradients_are_zero(ignored):
    """An empty batch, and one in which every target is ignored."""
    hidden, weight, targets = drawn(torch.float32, 4 if ignored else 0)
    found = with_gradients(chunked(torch.full_like(targets, -100)), hidden, weight)
    assert_close(found, [torch.zeros(()), torch.zeros_like(hidden), torch.zeros_like(weight)], 0)


def test_half_precision_rounds_no_more_than_the_plain_loss():
    """The weight's gradient is summed over the chunks in single precision."""
    hidden, weight, targets = drawn(torch.float32, 2000)
    hidden, weight = hidden.bfloat16().float(), weight.bfloat16().float()
    exact = with_gradients(plain(targets), hidden.double(), weight.double())

    def errors(loss: Loss) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16):
            found = with_gradients(loss, hidden, weight)
        assert {each.dtype for each in found} == {torch.float32}
        pairs = zip(found, exact, strict=True)
        return [float((one - other).norm() / other.norm()) for one, other in pairs]

    ours = errors(chunked(targets))
    whole = errors(lambda h, w: F.cross_entropy(F.linear(h, w).float(), targets, reduction="sum"))
    assert ours[0] < 1e-4
    assert all(one < 1.1 * other + 1e-5 for one, other in zip(ours, whole, strict=True))


class _Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that is computed."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.entries = max(self.entries, result.numel())
        return result


def test_the_logits_are_never_all_in_memory():
    hidden, weight, targets = drawn(torch.float32)
    with _Largest() as largest:
        with_gradients(chunked(targets, 10), hidden, weight)
    assert largest.entries == max(10 * CLASSES, ROWS * WIDTH)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_caller_has_one_graph_for_all_chunks(monkeypatch, autocast):
    """In the caller's graph, the compiler would compute the logits of several chunks ahead."""
    torch.compiler.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    of_chunk = torch.compile(cross_entropy._chunk, backend=keep)
    monkeypatch.setattr(cross_entropy, "_compiled_chunk", lambda: of_chunk)
    whole, weight, every = drawn(torch.float32)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, ignore_index=3, chunk=20 * CLASSES)

    compiled = torch.compile(loss, backend="eager")
    for rows, expected_graphs in ((48, 1), (50, 2), (47, 2), (45, 2)):  # of one size, and of any
        hidden, targets = whole[:rows], every[:rows]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = (
                with_gradients(lambda h, w: each(h, w, targets), hidden, weight)  # noqa: B023
                for each in (compiled, loss)
            )
        assert_close(found, expected, 1e-2 if autocast else 1e-6)
        assert len(graphs) == expected_graphs
