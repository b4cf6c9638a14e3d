"""Cross-entropy of a linear layer's outputs in chunks, without all logits in memory.

The logits of a language model are its largest tensor: with 20,000 classes, 32 sequences of 2048
tokens have 5.2 GB of them in fp32, and their gradient is as large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

#: logits of a chunk, which take 4 bytes each in fp32
CHUNK = 2**26


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Return the cross-entropy of ``softmax(hidden @ weight.T)`` in nats, summed over the targets.

    Value and gradient are those of ``F.cross_entropy(F.linear(hidden, weight).float(), targets,
    reduction="sum")``. Under autocast the products are in its precision, and softmax, loss and the
    sum of the weight's gradient in fp32. The gradients are computed with the loss, so nothing is
    computed twice; they cannot be differentiated again.

    Args:
        hidden: inputs of the layer, ``[N, d]``.
        weight: matrix of the layer, ``[V, d]``.
        targets: index of the class of each input, int64 ``[N]``.
        ignore_index: target that does not count.
        label_smoothing: share of each target's weight that is spread over all classes.
        chunk: number of logits in memory at a time; at least one row of ``V``.

    """
    return linear_cross_entropies(
        hidden,
        weight,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        chunk=chunk,
    )[0]


def linear_cross_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return :func:`linear_cross_entropy`, and its value without smoothing and gradient."""
    product = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and product != torch.float64:
        product = torch.get_autocast_dtype(hidden.device.type)
    rows = max(1, chunk // len(weight))
    arguments = (hidden, weight, targets, ignore_index, label_smoothing, rows, product)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total, plain = _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
        return total, plain
    total, plain = _forward(*arguments)
    return total, plain


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> tuple[Tensor, Tensor]:
        total, plain, *gradients = _forward(*arguments, gradients=True)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # multiplied in single precision: the factor is the same for all weights
        scaled = [(each.to(gradient.dtype) * gradient).to(each.dtype) for each in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    rows: int,
    product: torch.dtype,
    *,
    gradients: bool = False,
) -> tuple[Tensor, ...]:
    """Return the loss, the one without smoothing and, if requested, the gradients of the first.

    A chunk has ``rows`` inputs; matrix products are in the precision ``product``.
    """
    exact = torch.promote_types(product, torch.float32)
    matrix, total = weight.to(product), hidden.new_zeros((), dtype=exact)
    plain = total.clone()
    of_hidden: list[Tensor] = []
    of_weight = torch.zeros_like(weight, dtype=exact) if gradients else weight
    parts = zip(hidden.to(product).split(rows), targets.split(rows), strict=True)
    for part, classes in parts:
        logits = (part @ matrix.T).to(exact)
        counted = classes != ignore_index
        classes, counted = classes.where(counted, 0)[:, None], counted.to(exact)[:, None]
        scores = logits.logsumexp(1, keepdim=True)
        losses = scores - logits.gather(1, classes)
        plain = plain + (losses * counted).sum()
        if smoothing:
            mean = scores - logits.mean(1, keepdim=True)
            losses = (1 - smoothing) * losses + smoothing * mean
            total = total + (losses * counted).sum()
        if gradients:
            slopes = logits.sub_(scores).exp_()
            if smoothing:
                slopes.sub_(smoothing / len(weight))
            slopes.scatter_add_(1, classes, torch.full_like(scores, smoothing - 1))
            slopes = slopes.mul_(counted).to(product)
            of_hidden.append(slopes @ matrix)
            of_weight += slopes.T @ part
    total = total if smoothing else plain.clone()
    if not gradients:
        return total, plain
    return total, plain, torch.cat(of_hidden).to(hidden.dtype), of_weight.to(weight.dtype)
