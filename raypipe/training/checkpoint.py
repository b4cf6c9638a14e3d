"""Checkpoints: written atomically and verified on reading. The newest and the best are kept.

``step_00000120/`` holds the weights (safetensors) and the states of the optimizer and the
gradient scaler. ``manifest.json``, written last, holds the step and the SHA-256 of every file.
A checkpoint without a manifest, or with a file that does not match it, is skipped in favor of
the one before it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from raypipe.storage.run_directory import RunDirectory
from raypipe.training.weights import read_weights, write_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """Training state after ``step`` steps."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    trace: str | None = None


#: returns the trace of a training after a number of steps; None beyond its end
Trace = Callable[[int], str | None]


@dataclass(frozen=True)
class CheckpointStore:
    """Checkpoints of one training run in its run directory."""

    run: RunDirectory
    trial_id: str
    keep: int = 2

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and delete the oldest beyond ``keep``; only rank 0 calls this."""
        current = _name(checkpoint.step)
        folder = f"{self._folder}/{current}"
        files = {
            "model.safetensors": save_tensors(on_cpu(checkpoint.model)),
            "optimizer.pt": _dump(checkpoint.optimizer),
            "scaler.pt": _dump(checkpoint.scaler),
        }
        for name, content in files.items():
            self.run.write(f"{folder}/{name}", content)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        manifest = {"step": checkpoint.step, "sha256": digests, "trace": checkpoint.trace}
        self.run.write(f"{folder}/manifest.json", json.dumps(manifest).encode())
        names = self._names()
        earlier = [name for name in names if name <= current]
        # later checkpoints were skipped as damaged when the run resumed
        for name in {*names} - {*earlier[-self.keep :]}:
            self.run.delete(f"{self._folder}/{name}")

    def newest(
        self, warn: Callable[[str], None] = log.warning, trace: Trace | None = None
    ) -> Checkpoint | None:
        """Return the newest complete checkpoint, on the CPU, or None.

        Args:
            warn: receives a message for each checkpoint that is incomplete, corrupt or of another
                training.
            trace: of the training that continues; None accepts the checkpoints of any.

        """
        for name in reversed(self._names()):
            try:
                if trace is not None and not _is_of(self._manifest(name), trace):
                    warn(f"{self._folder}/{name} is of a training with other settings; not used")
                    continue
                return self._read(name)
            except (OSError, ValueError) as error:
                warn(
                    f"{self._folder}/{name} is incomplete or corrupt ({error}); "
                    "using the checkpoint before it"
                )
        return None

    def has(self, trace: Trace) -> bool:
        """Whether a checkpoint of the training with this trace is stored; it may be corrupt."""
        for name in reversed(self._names()):
            with suppress(OSError, ValueError):
                if _is_of(self._manifest(name), trace):
                    return True
        return False

    def save_best(self, model: Mapping[str, Tensor], step: int) -> None:
        """Write the best model so far; only rank 0 calls this."""
        write_weights(self.run, self._best, on_cpu(model), {"step": str(step)})

    def best(self) -> dict[str, Tensor]:
        """Return the best model, on the CPU.

        Raises:
            ConfigError: no best model was kept, or it is damaged.

        """
        return read_weights(self.run, self._best)[0]

    @property
    def _best(self) -> str:
        return f"{self._folder}/best.safetensors"

    @property
    def _folder(self) -> str:
        return self.run.checkpoints(self.trial_id)

    def _names(self) -> list[str]:
        return [name for name in self.run.list(self._folder) if name.startswith("step_")]

    def prune(self, keep: int) -> None:
        """Delete all but the newest checkpoints; of none, delete the best model, too."""
        if keep == 0:
            self.run.delete(self._folder)
        for name in self._names()[: -keep or None]:
            self.run.delete(f"{self._folder}/{name}")

    def _manifest(self, name: str) -> _Manifest:
        """Read a checkpoint's manifest.

        Raises:
            OSError, ValueError: it is missing or corrupt.

        """
        content = self.run.read(f"{self._folder}/{name}/manifest.json")
        try:
            manifest = _Manifest.model_validate_json(content)
        except ValidationError as error:
            raise ValueError("manifest.json is damaged") from error
        if _name(manifest.step) != name:
            raise ValueError("manifest.json is damaged")
        return manifest

    def _read(self, name: str) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            OSError, ValueError: the checkpoint is incomplete or corrupt.

        """
        folder, manifest = f"{self._folder}/{name}", self._manifest(name)
        files = {}
        for file in _FILES:
            files[file] = self.run.read(f"{folder}/{file}")
            if hashlib.sha256(files[file]).hexdigest() != manifest.sha256.get(file):
                raise ValueError(f"{file} is damaged")
        try:
            model, optimizer, scaler = (load(files[file]) for file, load in _FILES.items())
        except Exception as error:  # the parsers raise arbitrary errors on foreign files
            raise ValueError(f"of another form: {type(error).__name__}: {error}") from error
        return Checkpoint(manifest.step, model, optimizer, scaler, manifest.trace)


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each tensor on the CPU.

    safetensors rejects tensors that share memory, such as tied weights.
    """
    return {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()
    }


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True)

    step: int
    sha256: dict[str, str]
    trace: str | None = None


def _is_of(manifest: _Manifest, trace: Trace) -> bool:
    """Whether a checkpoint continues a training; those of raypipe 0.2 have no trace."""
    expected = trace(manifest.step)
    return expected is not None and manifest.trace in (None, expected)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _dump(state: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _load(content: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


_FILES: Mapping[str, Callable[[bytes], Any]] = {
    "model.safetensors": load_tensors,
    "optimizer.pt": _load,
    "scaler.pt": _load,
}
