"""Adafactor that never waits for the device, for plain and for sharded weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from raypipe.training import parallel

#: entries of a bf16 weight that are updated at a time, in fp32
_AT_ONCE = 2**24


class Adafactor(torch.optim.Adafactor):
    """``torch.optim.Adafactor`` with rates that stay on the device.

    torch's own reads two norms per weight on the host, and does not support ``DTensor``. The state
    is the same (Shazeer and Stern 2018, Adafactor: adaptive learning rates with sublinear memory
    cost, algorithms 4 and 5). Sharded weights are split along their first dimension, as FSDP does:
    means and norms are those of the whole weights, exchanged twice per step, and every worker holds
    all ``n + m`` means of an ``[n, m]`` matrix. A step overwrites the gradients with the updates.

    Means and rates of bf16 weights are in fp32, and new weights are rounded at random.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch would round its means to the precision of the weights."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, values in state_dict["state"].items():
            parameter = parameters[index]
            if parameter.dtype == torch.bfloat16:
                for key in values.keys() - {"step"}:
                    self.state[parameter][key] = values[key].to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take an optimizer step; ``closure`` is ignored."""
        del closure
        chosen = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not chosen:
            return
        parameters, groups = [p for p, _ in chosen], [group for _, group in chosen]
        weights = parallel.local(parameters)
        gradients = parallel.local([parameter.grad for parameter in parameters])
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"].item() for state in states]  # on the CPU
        shares = [step ** g["beta2_decay"] for step, g in zip(steps, groups, strict=True)]
        roots = [math.sqrt(parameter.numel()) for parameter in parameters]

        factored = [i for i, state in enumerate(states) if "row_var" in state]
        sums = [s for i in factored for s in _sums(parameters[i], gradients[i])]
        exact = _exact(weights[0].dtype)
        squares = torch.stack(torch._foreach_norm(weights, dtype=exact)).square_()
        squares, *sums = _over_workers([squares, *sums], parameters)
        alphas = list(squares.sqrt_().unbind())  # root mean squares of the weights, then rates
        torch._foreach_div_(alphas, roots)
        torch._foreach_clamp_min_(alphas, [group["eps"][1] for group in groups])
        rates = zip(steps, groups, strict=True)
        torch._foreach_mul_(alphas, [min(group["lr"], step**-0.5) for step, group in rates])
        if factored:
            moments = [states[i][key] for i in factored for key in ("row_var", "col_var")]
            torch._foreach_div_(sums, [parameters[i].shape[k] for i in factored for k in (-1, -2)])
            torch._foreach_lerp_(moments, sums, [shares[i] for i in factored for _ in range(2)])

        for parameter, group, state, gradient, share in zip(
            parameters, groups, states, gradients, shares, strict=True
        ):
            tiny = group["eps"][0]
            tiny = torch.finfo(exact).eps if tiny is None else tiny
            variance = _variance(parameter, state, gradient, share, tiny)
            gradient.mul_(variance.clamp_(min=tiny * tiny).rsqrt_())
        squares = torch.stack(torch._foreach_norm(gradients, dtype=exact)).square_()
        (squares,) = _over_workers([squares], parameters)
        clips = list(squares.sqrt_().unbind())
        scales = zip(roots, groups, strict=True)
        torch._foreach_div_(clips, [root * group["d"] for root, group in scales])
        torch._foreach_clamp_min_(clips, 1.0)
        torch._foreach_div_(alphas, clips)
        kept = [1 - group["lr"] * group["weight_decay"] for group in groups]
        noise = torch.Generator(weights[0].device).manual_seed(int(max(steps)))
        for weight, update, alpha, share in zip(weights, gradients, alphas, kept, strict=True):
            if weight.dtype == torch.bfloat16:
                _update_half(weight, update, alpha, share, noise)
            else:
                (weight if share == 1 else weight.mul_(share)).addcmul_(update, alpha, value=-1)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a weight, which may be new, in its next step."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            own, shape = parallel.local([parameter])[0], parameter.shape
            exact = _exact(own.dtype)
            state["step"] = torch.zeros(())
            if parameter.dim() > 1:
                state["row_var"] = own.new_zeros((*shape[:-1], 1), dtype=exact)
                state["col_var"] = own.new_zeros((*shape[:-2], 1, shape[-1]), dtype=exact)
            else:
                state["variance"] = torch.zeros_like(parameter, dtype=exact)
        state["step"] += 1
        return state


def _sums(parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squares of this worker's gradient, summed over columns and over rows.

    Sums that other workers hold are zero.
    """
    exact = _exact(gradient.dtype)
    rows, columns = (
        torch.linalg.vector_norm(gradient, dim=dim, keepdim=True, dtype=exact).square_()
        for dim in (-1, -2)
    )
    rows = _spread(parameter, rows)
    return rows, columns if parameter.dim() == 2 else _spread(parameter, columns)


def _variance(
    parameter: Tensor, state: dict[str, Any], gradient: Tensor, share: float, tiny: float
) -> Tensor:
    """Return the second moment of the entries that this worker holds, as a new tensor."""
    if "variance" in state:
        moment: Tensor = parallel.local([state["variance"]])[0]
        return moment.lerp_(gradient.to(moment.dtype).square(), share).clone()
    rows, columns = state["row_var"], state["col_var"]
    rows = rows / rows.mean(dim=-2, keepdim=True).clamp_(min=tiny)
    own = _own(parameter)
    return torch.mul(rows[own], columns if parameter.dim() == 2 else columns[own])


def _update_half(
    weight: Tensor, update: Tensor, alpha: Tensor, share: float, noise: torch.Generator
) -> None:
    """Set a bf16 weight to ``share * weight - alpha * update``, rounded up or down at random.

    The probabilities keep the mean: updates far below the spacing of bf16 have their effect over
    many steps, where rounding to the nearest value would drop each of them.
    """
    parts = zip(weight.view(-1).split(_AT_ONCE), update.view(-1).split(_AT_ONCE), strict=True)
    for part, change in parts:
        value = part.float().mul_(share).addcmul_(change.float(), alpha, value=-1)
        bits = value.view(torch.int32)  # bf16 has the upper half of them
        bits += torch.randint(
            2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=noise
        )
        part.copy_(bits.bitwise_and_(-(2**16)).view(torch.float32))


def _exact(kind: torch.dtype) -> torch.dtype:
    """Return the precision of means and rates for weights of a precision."""
    return torch.promote_types(kind, torch.float32)


def _own(parameter: Tensor) -> slice:
    """Return the part of the first dimension that this worker holds."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    rows, rank = parallel.shard_rows(parameter), parameter.device_mesh.get_local_rank()
    start = sum(rows[:rank])
    return slice(start, start + rows[rank])


def _spread(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a worker's part along the first dimension with zeros in place of the others'."""
    if not isinstance(parameter, DTensor):
        return part
    whole = part.new_zeros((len(parameter), *part.shape[1:]))
    whole[_own(parameter)] = part
    return whole


def _over_workers(parts: list[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums over the workers that share the weights, in one exchange."""
    mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
    if mesh is None:
        return parts
    packed = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(packed, group=mesh.get_group())
    pieces = packed.split([part.numel() for part in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
