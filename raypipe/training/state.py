"""State of a model and its optimizer by the names of the parameters.

It is gathered on rank 0, or every worker takes its part of a sharded model. It can be given back to
any number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from raypipe.training import parallel
from raypipe.training.checkpoint import Joined
from raypipe.training.loader import over_leaves
from raypipe.training.parallel import Worker

# on rank 0's CPU
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def model_state(model: nn.Module, worker: Worker) -> dict[str, Any]:
    """Return a copy of the full model state on rank 0, empty elsewhere; every worker must call."""
    return _copied(get_model_state_dict(model, options=_WHOLE), worker)


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``model_state``, and the same of the optimizer."""
    state = dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))
    return model_state(model, worker), _copied(state, worker)


def _copied(state: dict[str, Any], worker: Worker) -> dict[str, Any]:
    """Return a state that the training does not change.

    torch copies what is on a GPU, but not numbers of steps, which optimizers keep on the CPU.
    """
    if worker.rank:
        return state
    on_cpu = worker.device.type == "cpu"

    def copy(leaf: Any) -> Any:
        own = isinstance(leaf, Tensor) and (on_cpu or leaf.dim() == 0)
        return leaf.clone() if own else leaf

    copied: dict[str, Any] = over_leaves(state, copy)
    return copied


def own_part(
    model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of the state of a sharded model that this worker holds, on the CPU.

    Rank 0 also has what is not sharded, such as buffers and numbers of steps.
    """
    weights = _own(model.state_dict(), worker)
    states = {}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            plain = name.replace(_CHECKPOINT_PREFIX, "")
            states[plain] = _own(optimizer.state[parameter], worker)
    return weights, {"state": states}


def _own(values: Mapping[str, Any], worker: Worker) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if isinstance(value, DTensor) and tuple(value.placements) == (Shard(0),):
            found[name] = value.to_local().detach().to("cpu", copy=True)
            continue
        full = parallel.whole(value) if isinstance(value, Tensor) else value
        if worker.rank == 0:
            is_tensor = isinstance(full, Tensor)
            found[name] = full.detach().to("cpu", copy=True) if is_tensor else full
    return found


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Any],
    state: Mapping[str, Any],
    worker: Worker,
) -> None:
    """Restore the full state, which rank 0 has; every worker must call this.

    The others give empty states. Each receives its part tensor by tensor on its device.

    Raises:
        ValueError: the model has other weights.

    """
    # torch's setter requires state for every parameter; one without gradients has none
    stored, own = state.get("state", {}), model.state_dict()
    described, states_described = parallel.from_rank_0(
        (_described(weights), {name: _described(values) for name, values in stored.items()}), worker
    )
    if described.keys() != own.keys():
        different = sorted(described.keys() ^ own.keys())
        raise ValueError(f"the checkpoint is of another model, without or with {different[:5]}")
    for name, target in own.items():
        part = _received(name, described[name], weights.get(name), target, worker)
        with torch.no_grad():
            for into, value in zip(parallel.local([target]), parallel.local([part]), strict=True):
                into.copy_(value)
    names = {parameter: name for name, parameter in model.named_parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {}
    for index, parameter in enumerate(updated):
        name = names[parameter].replace(_CHECKPOINT_PREFIX, "")
        if name in states_described:
            values = stored.get(name, {})
            states[index] = {
                key: _received(key, about, values.get(key), parameter, worker)
                for key, about in states_described[name].items()
            }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return single values themselves, such as numbers of steps, and the form of other tensors."""
    found = {}
    for name, value in values.items():
        parts = value.parts if isinstance(value, Joined) else [value]
        is_large = isinstance(parts[0], Tensor) and parts[0].dim() > 0
        forms = [torch.empty_like(part, device="meta") for part in parts] if is_large else []
        found[name] = torch.cat(forms) if forms else value
    return found


def _received(key: str, about: Any, value: Any, parameter: Tensor, worker: Worker) -> Any:
    """Return this worker's part of a value that rank 0 has; Adafactor's means stay whole."""
    if not isinstance(about, Tensor) or not about.is_meta:
        return about
    if value is None:
        full = torch.empty_like(about, device=parameter.device)
    else:
        whole = value.whole() if isinstance(value, Joined) else value
        full = whole.to(parameter.device, copy=True)
    # row_var and col_var may have the shape of a matrix with one column or row
    is_mean = key in ("row_var", "col_var")
    if isinstance(parameter, DTensor) and about.shape == parameter.shape and not is_mean:
        return distribute_tensor(full, parameter.device_mesh, parameter.placements)
    if worker.workers > 1:
        dist.broadcast(full, src=0)
    return full
