"""Adafactor on weights that are divided among workers, which torch's own does not take."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from raypipe.training import parallel


class ShardedAdafactor(torch.optim.Adafactor):
    """The step of ``torch.optim.Adafactor`` with every parameter a ``DTensor``, as of FSDP.

    Means and norms are those of the whole weights (Shazeer and Stern 2018, Adafactor: adaptive
    learning rates with sublinear memory cost, algorithms 4 and 5), so the workers change no
    result. Of an ``[n, m]`` matrix every worker holds the ``n + m`` means: next to nothing.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step; there is no closure to call."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._take(group, parameter, parameter.grad)

    def _take(self, group: dict[str, Any], parameter: DTensor, gradient: DTensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            if gradient.dim() > 1:
                held = gradient.to_local()
                state["row_var"] = held.new_zeros((*gradient.shape[:-1], 1))
                state["col_var"] = held.new_zeros((*gradient.shape[:-2], 1, gradient.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(gradient)
        state["step"] += 1
        steps, (tiny, least) = state["step"].item(), group["eps"]
        tiny = torch.finfo(parameter.dtype).eps if tiny is None else tiny
        rate = max(least, _rms(parameter)) * min(group["lr"], steps**-0.5)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        variance = _variance(state, gradient, steps ** group["beta2_decay"], tiny)
        update = variance.clamp(min=tiny * tiny).rsqrt_().mul_(gradient)
        parameter.add_(update, alpha=-rate / max(1.0, _rms(update) / group["d"]))


def _variance(state: dict[str, Any], gradient: DTensor, share: float, tiny: float) -> Tensor:
    """The second moment of each entry after this gradient, divided as the gradient is."""
    squares = gradient.square()
    if "variance" in state:
        moment: Tensor = state["variance"].lerp_(squares, share)
        return moment
    row_var, col_var = state["row_var"], state["col_var"]
    # sums, not means: workers may hold parts of different sizes
    row_var.lerp_(parallel.whole(squares.sum(-1, keepdim=True)) / gradient.shape[-1], share)
    col_var.lerp_(parallel.whole(squares.sum(-2, keepdim=True)) / gradient.shape[-2], share)
    rows = row_var / row_var.mean(dim=-2, keepdim=True).clamp(min=tiny)
    mesh = gradient.device_mesh
    columns = DTensor.from_local(col_var, mesh)
    return distribute_tensor(rows, mesh, gradient.placements, src_data_rank=None) @ columns


def _rms(tensor: Tensor) -> float:
    return math.sqrt(parallel.whole(tensor.square().sum()).item() / tensor.numel())
