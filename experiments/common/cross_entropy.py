"""Cross-entropy of a linear layer's outputs in chunks, without all logits in memory.

The logits of a language model are its largest tensor: with 20,000 classes, 32 sequences of 2048
tokens have 5.2 GB of them in fp32, and their gradient is as large. torch has such a function since
2.13 (``torch.nn.functional.linear_cross_entropy``); in bf16 it rounds the sum of the loss to bf16,
and the gradient of the weight after each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: logits of a chunk, which take 4 bytes each in fp32, and 2 more in half precision
CHUNK = 2**27


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return the cross-entropy of ``softmax(hidden @ weight.T)`` in nats, summed over the targets.

    Value and gradient are those of ``F.cross_entropy(F.linear(hidden, weight).float(), targets,
    reduction="sum")``. Under autocast the products are in its precision, and softmax, loss and the
    sum of the weight's gradient in fp32. The gradients are computed with the loss, so nothing is
    computed twice. They cannot be differentiated again. The backward pass scales each gradient that
    has the type of its input in place; a second pass then raises RuntimeError. In a compiled
    function, a chunk is compiled by itself: in one graph, the compiler would compute the logits of
    several chunks ahead.

    Args:
        hidden: inputs of the layer, ``[N, d]``.
        weight: matrix of the layer, ``[V, d]``.
        targets: index of the class of each input, int64 ``[N]``.
        options: those of :func:`linear_cross_entropies`.

    """
    return linear_cross_entropies(hidden, weight, targets, **options)[0]


def linear_cross_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return :func:`linear_cross_entropy`, and its value without smoothing and gradient.

    Args:
        hidden: inputs of the layer, ``[N, d]``.
        weight: matrix of the layer, ``[V, d]``.
        targets: index of the class of each input, int64 ``[N]``.
        ignore_index: target that does not count.
        label_smoothing: share of each target's weight that is spread over all classes.
        chunk: greatest number of logits in memory at a time; at least one row of ``V``.

    """
    product = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and product != torch.float64:
        product = torch.get_autocast_dtype(hidden.device.type)
    options = ignore_index, label_smoothing, chunk, product, torch.compiler.is_compiling()
    total, plain = _loss(hidden, weight, targets, *options)
    return total, plain


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loss(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the losses; a compiled caller calls this instead of compiling it with itself."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        done: tuple[Tensor, ...] = _LinearCrossEntropy.apply(hidden, weight, *arguments)  # type: ignore[no-untyped-call]
        return done
    return _forward(hidden, weight, *arguments, gradients=False)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        total, plain, *gradients = _forward(*arguments, gradients=True)
        ctx.save_for_backward(*gradients)
        ctx.types = [each.dtype for each in arguments[:2]]
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # multiplied in single precision: the factor is the same for all weights; in place where the
        # types are equal: a second pass finds a saved tensor modified and raises RuntimeError
        pairs = zip(ctx.saved_tensors, ctx.types, strict=True)
        scaled = [
            torch.mul(
                each,
                gradient[None],
                out=each if each.dtype == kind else torch.empty_like(each, dtype=kind),
            )
            for each, kind in pairs
        ]
        return *scaled, None, None, None, None, None, None


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    chunk: int,
    product: torch.dtype,
    compiled: bool,
    *,
    gradients: bool,
) -> tuple[Tensor, ...]:
    """Return the loss, the one without smoothing and, if requested, the gradients of the first.

    Matrix products are in the precision ``product``.
    """
    exact = torch.promote_types(product, torch.float32)
    counted = (targets != ignore_index)[:, None]
    classes, counted = targets[:, None].where(counted, 0), counted.to(exact)
    # the gradient of a chunk's inputs takes their place
    inputs, matrix = hidden.to(product, copy=gradients), weight.to(product)
    # a power of two: chunks of one shape, which is compiled once and fits the tensor cores
    rows = 2 ** (max(1, chunk // len(weight)).bit_length() - 1)
    parts = zip(inputs.split(rows), classes.split(rows), counted.split(rows), strict=True)
    of_chunk = _compiled_chunk() if compiled else _chunk
    losses, of_weight = [], None
    for part, labels, counts in parts:
        *found, slopes = of_chunk(part, labels, counts, matrix, smoothing, gradients)
        losses.append(found)
        if gradients:
            added = slopes.T @ part
            if of_weight is None:
                of_weight = added if len(part) == len(inputs) else added.to(exact)
            else:
                of_weight += added
            torch.mm(slopes, matrix, out=part)
        del slopes  # before the next chunk's logits
    total, plain = (torch.cat(each).sum() for each in zip(*losses, strict=True))
    return (total, plain) if of_weight is None else (total, plain, inputs, of_weight)


def _chunk(
    inputs: Tensor,
    classes: Tensor,
    counted: Tensor,
    matrix: Tensor,
    smoothing: float,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each input, the one without smoothing, and the slope of each logit.

    Without ``gradients``, the slopes are not computed.
    """
    logits = (inputs @ matrix.T).to(counted.dtype)
    of_class, scores = logits.gather(1, classes), logits.amax(1, keepdim=True)
    mean = logits.mean(1, keepdim=True) if smoothing else of_class
    sums = logits.sub_(scores).exp_().sum(1, keepdim=True)
    scores = scores + sums.log()
    plain = (scores - of_class) * counted
    total = (scores - of_class.lerp(mean, smoothing)) * counted if smoothing else plain
    if not gradients:
        return total, plain, logits
    slopes = logits.mul_(counted / sums)
    if smoothing:
        slopes.sub_(counted * (smoothing / len(matrix)))
    slopes.scatter_add_(1, classes, counted * (smoothing - 1))
    return total, plain, slopes.to(matrix.dtype)


@functools.cache
def _compiled_chunk() -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(_chunk)
