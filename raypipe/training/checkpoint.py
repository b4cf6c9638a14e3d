"""Checkpoints: gathered on rank 0, verified on reading.

``step_00000120/state.pt`` holds the weights and the states of the optimizer and the gradient scaler
by the names of the parameters, the same for every strategy and number of workers.
``manifest.json``, written last, holds the step and the SHA-256 of the file. A checkpoint without a
manifest, or with a file that does not match it, is skipped in favor of the one before it. The
newest ones are kept, and the weights of the best evaluation.

``torch.distributed.checkpoint.save`` is not used: reading one unpickles a file, so that whoever
writes into a run directory could run code.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from raypipe.store.run_directory import RunDirectory
from raypipe.training import parallel
from raypipe.training.job import ScheduleTrace
from raypipe.training.loader import over_leaves
from raypipe.training.parallel import Worker
from raypipe.training.weights import read_weights, write_weights

log = logging.getLogger(__name__)

_MANIFEST, _STATE = "manifest.json", "state.pt"
# on rank 0's CPU
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Checkpoint:
    """Training state after ``step`` steps."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    trace: str | None = None


@dataclass(frozen=True)
class CheckpointStore:
    """Checkpoints of one training run in its run directory."""

    run: RunDirectory
    trial_id: str
    keep: int = 2

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and delete the oldest beyond ``keep``; only rank 0 calls this.

        Tensors on the CPU are written from where they are, without a copy.
        """
        current = _name(checkpoint.step)
        content = {name: getattr(checkpoint, name) for name in ("model", "optimizer", "scaler")}
        with self.run.writing(f"{self._folder}/{current}/{_STATE}") as stream:
            hashing = _Hashing(stream)
            try:
                torch.save(content, cast("IO[bytes]", hashing))
            except RuntimeError as error:  # torch could not end the file, and hides the reason
                raise (error.__context__ or error) from None
        sha256 = hashing.digest.hexdigest()
        self._describe(_Manifest(step=checkpoint.step, sha256=sha256, trace=checkpoint.trace))
        # later checkpoints were skipped as damaged when the run resumed
        earlier = [name for name in self._names() if name <= current]
        self._delete_except(earlier[-self.keep :])

    def newest(
        self, warn: Callable[[str], None] = log.warning, trace: ScheduleTrace | None = None
    ) -> Checkpoint | None:
        """Return the newest complete checkpoint, on the CPU, or None.

        The tensors of a local one are mapped to its file, and take memory as they are read.

        Args:
            warn: receives a message for each checkpoint that is incomplete or corrupt and, if none
                can be used, for each one of another training.
            trace: of the training that continues; None accepts the checkpoints of any.

        """
        others = []
        for name in reversed(self._names()):
            try:
                if trace is None or _is_of(self._manifest(name), trace):
                    return self.read(name)
                others.append(name)
            except (OSError, ValueError) as error:
                warn(
                    f"{self._folder}/{name} is incomplete or corrupt ({error}); "
                    "using the checkpoint before it"
                )
        for name in others:
            warn(f"{self._folder}/{name} is of a training with other settings; not used")
        return None

    def has(self, trace: ScheduleTrace) -> bool:
        """Whether a checkpoint of the training with this trace is stored; it may be corrupt."""
        for name in reversed(self._names()):
            with suppress(OSError, ValueError):
                if _is_of(self._manifest(name), trace):
                    return True
        return False

    def adopt(self, trace: ScheduleTrace) -> None:
        """Make all checkpoints those of the training with this trace, which goes on from them."""
        for name in self._names():
            manifest = self._manifest(name)
            self._describe(manifest.model_copy(update={"trace": trace(manifest.step)}))

    def read(self, name: str) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            OSError, ValueError: it is incomplete or corrupt.

        """
        manifest, path = self._manifest(name), f"{self._folder}/{name}/{_STATE}"
        local = self.run.is_local
        with Path(path).open("rb") if local else io.BytesIO(self.run.read(path)) as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != manifest.sha256:
                raise ValueError(f"{_STATE} is damaged")
            try:
                source: Any = path if local else stream
                state = torch.load(source, map_location="cpu", weights_only=True, mmap=local)
                return Checkpoint(manifest.step, **state, trace=manifest.trace)
            except Exception as error:  # the parser raises arbitrary errors on foreign files
                raise ValueError(f"of another form: {type(error).__name__}: {error}") from error

    def save_best(self, model: Mapping[str, Tensor], step: int, keep: Collection[int]) -> None:
        """Write the model of the best step so far; only rank 0 calls this.

        The models of earlier best steps are deleted, but for those of the steps ``keep``.
        """
        write_weights(self.run, self._best(step), model, {"step": str(step)})
        kept = {self._best(each) for each in (step, *keep)}
        for name in self.run.list(self._folder):
            path = f"{self._folder}/{name}"
            if name.startswith("best_") and path not in kept:
                self.run.delete(path)

    def best(self, step: int) -> dict[str, Tensor]:
        """Return the model of the best step, on the CPU.

        Raises:
            ConfigError: it was not kept, or is damaged.

        """
        return read_weights(self.run, self._best(step))[0]

    def prune(self, keep: int) -> None:
        """Delete all but the newest checkpoints; of none, delete the best models, too."""
        if keep == 0:
            self.run.delete(self._folder)
        else:
            self._delete_except(self._names()[-keep:])

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints."""
        return [int(name.removeprefix("step_")) for name in self._names()]

    @property
    def _folder(self) -> str:
        return self.run.checkpoints(self.trial_id)

    def _best(self, step: int) -> str:
        return f"{self._folder}/best_{step:08d}.safetensors"

    def _names(self) -> list[str]:
        return [name for name in self.run.list(self._folder) if name.startswith("step_")]

    def _delete_except(self, kept: Sequence[str]) -> None:
        for name in {*self._names()} - {*kept}:
            self.run.delete(f"{self._folder}/{name}")

    def _describe(self, manifest: _Manifest) -> None:
        path = f"{self._folder}/{_name(manifest.step)}/{_MANIFEST}"
        self.run.write(path, manifest.model_dump_json().encode())

    def _manifest(self, name: str) -> _Manifest:
        """Read a checkpoint's manifest.

        Raises:
            OSError, ValueError: it is missing or corrupt.

        """
        content = self.run.read(f"{self._folder}/{name}/{_MANIFEST}")
        with suppress(ValidationError):
            manifest = _Manifest.model_validate_json(content)
            if _name(manifest.step) == name:
                return manifest
        raise ValueError("manifest.json is damaged")


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the full model state on rank 0, empty elsewhere; every worker must call this.

    On a CPU the tensors are those of the model.
    """
    return dict(get_model_state_dict(model, options=_WHOLE))


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``model_state``, and the same of the optimizer."""
    return model_state(model), dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Any],
    state: Mapping[str, Any],
    worker: Worker,
) -> None:
    """Restore the full state, which rank 0 has; every worker must call this.

    The others give empty states. Each receives its part tensor by tensor on its device.

    Raises:
        RuntimeError: the model has other weights.

    """
    several = worker.workers > 1
    options = StateDictOptions(full_state_dict=several, broadcast_from_rank0=several)
    set_model_state_dict(model, weights, options=options)
    # torch's setter for optimizers needs a state of every parameter, and none of them a gradient;
    # one that never had a gradient has no state
    stored = state.get("state", {})
    described = parallel.from_rank_0(over_leaves(stored, _described), worker)
    names = {parameter: name for name, parameter in model.named_parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {}
    for index, parameter in enumerate(updated):
        name = names[parameter]
        if name in described:
            values = stored.get(name, {})
            states[index] = {
                key: _received(key, about, values.get(key), parameter, worker)
                for key, about in described[name].items()
            }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _described(value: Any) -> Any:
    """Return a single value itself, such as a number of steps, and the form of other tensors."""
    is_large = isinstance(value, Tensor) and value.dim() > 0
    return torch.empty_like(value, device="meta") if is_large else value


def _received(key: str, about: Any, value: Any, parameter: Tensor, worker: Worker) -> Any:
    """Return this worker's part of a value that rank 0 has; Adafactor's state stays whole."""
    if not isinstance(about, Tensor) or not about.is_meta:
        return about
    full = torch.empty_like(about, device=parameter.device)
    if value is not None:
        full.copy_(value)
    is_part = about.shape == parameter.shape and key not in ("row_var", "col_var", "variance")
    if isinstance(parameter, DTensor) and is_part:
        return distribute_tensor(full, parameter.device_mesh, parameter.placements)
    if worker.workers > 1:
        dist.broadcast(full, src=0)
    return full


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True)

    step: int
    sha256: str
    trace: str | None = None


def _is_of(manifest: _Manifest, trace: ScheduleTrace) -> bool:
    """Whether a checkpoint continues a training."""
    return manifest.trace is not None and manifest.trace == trace(manifest.step)


def _name(step: int) -> str:
    return f"step_{step:08d}"


class _Hashing:
    """Stream to a file that computes the checksum of what is written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        """Write to the file."""
        self.digest.update(content)
        self._stream.write(content)
        return len(content)

    def flush(self) -> None:
        """Do nothing: the file is flushed at its end."""
