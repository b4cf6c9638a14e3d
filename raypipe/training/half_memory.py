"""Memory of a forward pass in bf16: halved activations, and copies of weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from raypipe.training import parallel


def bf16_may_fit(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    recompute: bool,
    sharded: bool,
) -> bool:
    """Whether bf16 could make a forward pass fit that has just run out of memory in fp32.

    Autocast makes a copy of 2 bytes per weight, and halves activations at best. In addition to
    weights, gradients and the state of the optimizer, the pass must therefore have had 4 bytes for
    each weight that is copied at the same time. Always True on a CPU.

    Args:
        model: the model on its device, maybe sharded.
        blocks: its blocks.
        optimizer: its optimizer.
        recompute: whether the activations of blocks are recomputed.
        sharded: whether the blocks are gathered in bf16.

    """
    weights = [weight for weight in parallel.local(list(model.parameters())) if weight.is_cuda]
    if not weights:
        return True
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*weights, *(weight for weight in weights if weight.requires_grad)]
    held += parallel.local([each for each in states if isinstance(each, Tensor) and each.is_cuda])
    room = torch.cuda.max_memory_allocated(weights[0].device) - sum(each.nbytes for each in held)
    return room >= 4 * copied_weights(model, blocks, recompute=recompute, sharded=sharded)


def copied_weights(
    model: nn.Module, blocks: Iterable[nn.Module], *, recompute: bool, sharded: bool
) -> int:
    """Return the number of weights of which autocast has 16-bit copies at the same time.

    That is all of them, but with recomputation one block's, and none of blocks that are gathered in
    bf16. Embeddings are looked up, not copied.
    """
    owners = (m for m in model.modules() if not isinstance(m, nn.Embedding))
    used = {weight for owner in owners for weight in owner.parameters(recurse=False)}
    sizes = [sum(w.numel() for w in used.intersection(block.parameters())) for block in blocks]
    outside = sum(weight.numel() for weight in used) - sum(sizes)
    if sharded:
        return outside
    return outside + (max(sizes, default=0) if recompute else sum(sizes))
