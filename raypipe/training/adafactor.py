"""Adafactor for sharded weights, which torch's own implementation does not support."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from raypipe.training import parallel


class ShardedAdafactor(torch.optim.Adafactor):
    """``torch.optim.Adafactor`` for parameters that are all ``DTensor``, as with FSDP.

    Means and norms are those of the whole weights (Shazeer and Stern 2018, Adafactor: adaptive
    learning rates with sublinear memory cost, algorithms 4 and 5), so the result does not depend
    on the number of workers. For an ``[n, m]`` matrix every worker holds all ``n + m`` means,
    whose memory is negligible.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take an optimizer step; ``closure`` is ignored."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._take(group, parameter, parameter.grad)

    def _take(self, group: dict[str, Any], parameter: DTensor, gradient: DTensor) -> None:
        state, mesh, weights = self.state[parameter], gradient.device_mesh, parameter.to_local()
        if not state:
            state["step"] = torch.zeros(())
            if gradient.dim() > 1:
                state["row_var"] = weights.new_zeros((*gradient.shape[:-1], 1))
                state["col_var"] = weights.new_zeros((*gradient.shape[:-2], 1, gradient.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(gradient)
        state["step"] += 1
        steps, (tiny, least) = state["step"].item(), group["eps"]
        tiny = torch.finfo(parameter.dtype).eps if tiny is None else tiny
        size = parameter.numel()
        rate = max(least, _rms(weights, size, mesh)) * min(group["lr"], steps**-0.5)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        variance = _variance(state, gradient, steps ** group["beta2_decay"], tiny)
        update = variance.clamp(min=tiny * tiny).rsqrt_().mul_(gradient.to_local())
        weights.add_(update, alpha=-rate / max(1.0, _rms(update, size, mesh) / group["d"]))


def _variance(state: dict[str, Any], gradient: DTensor, share: float, tiny: float) -> Tensor:
    """Update the second moment and return it for the entries that this worker holds."""
    squares, mesh = gradient.square(), gradient.device_mesh
    if "variance" in state:
        moment: Tensor = state["variance"].lerp_(squares, share).to_local()
        return moment
    row_var, col_var = state["row_var"], state["col_var"]
    row_sums = parallel.whole(squares.sum(-1, keepdim=True))
    col_sums = parallel.whole(squares.sum(-2, keepdim=True))
    # divide the whole sums: workers may hold parts of different sizes
    row_var.lerp_(row_sums / gradient.shape[-1], share)
    col_var.lerp_(col_sums / gradient.shape[-2], share)
    rows = row_var / row_var.mean(dim=-2, keepdim=True).clamp(min=tiny)
    mine = distribute_tensor(rows, mesh, gradient.placements, src_data_rank=None)
    return torch.mul(mine.to_local(), col_var)


def _rms(part: Tensor, size: int, mesh: DeviceMesh) -> float:
    """Return the root mean square of a sharded tensor of ``size`` entries from the local part."""
    total = parallel.whole(DTensor.from_local(part.square().sum(), mesh, [Partial()]))
    return math.sqrt(total.item() / size)
