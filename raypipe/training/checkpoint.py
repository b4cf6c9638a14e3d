"""Checkpoints: written atomically and verified on reading. The newest and the best are kept.

``step_00000120/`` holds the weights (safetensors) and the states of the optimizer and the
gradient scaler. ``manifest.json``, written last, holds the step and the SHA-256 of every file.
That of a sharded model has such a folder inside per worker, with its part.
A checkpoint without a manifest, or with a file that does not match it, is skipped in favor of
the one before it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor

from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import read_weights, write_weights

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_POLL_S = 0.05


@dataclass(frozen=True)
class Joined:
    """A tensor whose parts, along its first dimension, are in several files."""

    parts: Sequence[Tensor]

    def whole(self) -> Tensor:
        """Return the tensor, which is read from the files."""
        return torch.cat(list(self.parts))


@dataclass(frozen=True)
class Checkpoint:
    """Training state after ``step`` steps."""

    step: int
    model: dict[str, Tensor | Joined]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    trace: str | None = None


#: returns the trace of a training after a number of steps; None beyond its end
Trace = Callable[[int], str | None]


@dataclass(frozen=True)
class CheckpointPart:
    """The part of a worker in the checkpoints of a sharded model.

    ``attempt`` is a text that the workers of one attempt share. ``is_ended`` tells rank 0 not to
    wait for the parts of the others any more.
    """

    rank: int
    workers: int
    attempt: str
    is_ended: Callable[[], bool]

    @property
    def names(self) -> list[str]:
        """The folders of all parts."""
        return [f"{self.attempt}-{rank:05d}" for rank in range(self.workers)]


@dataclass(frozen=True)
class CheckpointStore:
    """Checkpoints of one training run in its run directory; that of step ``pinned`` stays."""

    run: RunDirectory
    trial_id: str
    keep: int = 2
    pinned: int | None = None

    def save(self, checkpoint: Checkpoint, part: CheckpointPart | None = None) -> None:
        """Write a checkpoint and delete the oldest beyond ``keep``; rank 0 calls this.

        Of a sharded model, every worker writes its ``part``. Rank 0 waits for all parts, and then
        completes the checkpoint. Tensors on the CPU are written from where they are, without a
        copy.

        Raises:
            RuntimeError: the training ended before all parts were written.

        """
        current = _name(checkpoint.step)
        if part is None:
            self._write(current, checkpoint)
        else:
            self._write(f"{current}/{part.names[part.rank]}", checkpoint)
            if part.rank:
                return
            self._await(current, part)
            about = {"step": checkpoint.step, "trace": checkpoint.trace, "parts": part.names}
            self._write_manifest(current, {**about, "sha256": {}})
        names = self._names()
        earlier = [name for name in names if name <= current]
        # later checkpoints were skipped as damaged when the run resumed, unless a worker is ahead
        later = names[len(earlier) :] if part is None else []
        for name in {*earlier, *later} - {*earlier[-self.keep :], *self._pinned(earlier)}:
            self.run.delete(f"{self._folder}/{name}")

    def _await(self, name: str, part: CheckpointPart) -> None:
        """Wait until all parts are complete."""
        for each in part.names:
            while not self.run.exists(f"{self._folder}/{name}/{each}/{_MANIFEST}"):
                if part.is_ended():
                    raise RuntimeError(f"{name}: the part {each} of another worker is missing")
                time.sleep(_POLL_S)

    def _write(self, name: str, checkpoint: Checkpoint) -> None:
        folder = f"{self._folder}/{name}"
        contents = (checkpoint.model, checkpoint.optimizer, checkpoint.scaler)
        digests = {}
        for (file, form), content in zip(_FILES.items(), contents, strict=True):
            with self.run.writing(f"{folder}/{file}") as stream:
                hashing = _Hashing(stream)
                form.write(hashing, content)
            digests[file] = hashing.digest.hexdigest()
        about = {"step": checkpoint.step, "trace": checkpoint.trace}
        self._write_manifest(name, {**about, "sha256": digests})

    def _write_manifest(self, name: str, about: Mapping[str, Any]) -> None:
        self.run.write(f"{self._folder}/{name}/{_MANIFEST}", json.dumps(about).encode())

    def newest(
        self, warn: Callable[[str], None] = log.warning, trace: Trace | None = None
    ) -> Checkpoint | None:
        """Return the newest complete checkpoint, on the CPU, or None.

        The tensors of a local one are mapped to its files, and take memory as they are read.

        Args:
            warn: receives a message for each checkpoint that is incomplete or corrupt and, if none
                can be used, for each one of another training.
            trace: of the training that continues; None accepts the checkpoints of any.

        """
        others = []
        for name in reversed(self._names()):
            try:
                if trace is not None and not _is_of(self._manifest(name), trace):
                    others.append(name)
                    continue
                return self._read(name)
            except (OSError, ValueError) as error:
                warn(
                    f"{self._folder}/{name} is incomplete or corrupt ({error}); "
                    "using the checkpoint before it"
                )
        for name in others:
            warn(f"{self._folder}/{name} is of a training with other settings; not used")
        return None

    def has(self, trace: Trace) -> bool:
        """Whether a checkpoint of the training with this trace is stored; it may be corrupt."""
        for name in reversed(self._names()):
            with suppress(OSError, ValueError):
                if _is_of(self._manifest(name), trace):
                    return True
        return False

    def save_best(self, model: Mapping[str, Tensor], step: int, keep: Collection[int]) -> None:
        """Write the model of the best step so far; only rank 0 calls this.

        The models of earlier best steps are deleted, but for those of the steps ``keep``.
        """
        write_weights(self.run, self._best(step), on_cpu(model), {"step": str(step)})
        for name in self.run.list(self._folder):
            number = name.removeprefix("best_").removesuffix(".safetensors")
            if name != number and number.isdigit() and int(number) not in {step, *keep}:
                self.run.delete(f"{self._folder}/{name}")

    def best(self, step: int) -> dict[str, Tensor]:
        """Return the model of the best step, on the CPU.

        Raises:
            ConfigError: it was not kept, or is damaged.

        """
        return read_weights(self.run, self._best(step))[0]

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints."""
        return [int(name.removeprefix("step_")) for name in self._names()]

    def _best(self, step: int) -> str:
        return f"{self._folder}/best_{step:08d}.safetensors"

    @property
    def _folder(self) -> str:
        return self.run.checkpoints(self.trial_id)

    def _names(self) -> list[str]:
        return [name for name in self.run.list(self._folder) if name.startswith("step_")]

    def prune(self, keep: int) -> None:
        """Delete all but the newest checkpoints; of none, delete the best models, too."""
        if keep == 0:
            self.run.delete(self._folder)
        names = self._names()
        for name in {*names[: -keep or None]} - {*self._pinned(names)}:
            self.run.delete(f"{self._folder}/{name}")

    def _pinned(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.pinned and name == _name(self.pinned)]

    def _manifest(self, name: str) -> _Manifest:
        """Read a checkpoint's manifest.

        Raises:
            OSError, ValueError: it is missing or corrupt.

        """
        content = self.run.read(f"{self._folder}/{name}/{_MANIFEST}")
        try:
            manifest = _Manifest.model_validate_json(content)
        except ValidationError as error:
            raise ValueError("manifest.json is damaged") from error
        if _name(manifest.step) != name.partition("/")[0]:
            raise ValueError("manifest.json is damaged")
        return manifest

    def _read(self, name: str) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            OSError, ValueError: the checkpoint is incomplete or corrupt.

        """
        folder, manifest = f"{self._folder}/{name}", self._manifest(name)
        if manifest.parts:
            parts = [self._read(f"{name}/{part}") for part in manifest.parts]
            return replace(parts[0], **_joined(parts), trace=manifest.trace)
        loaded = []
        for file, form in _FILES.items():
            path = f"{folder}/{file}"
            source = path if self.run.is_local else io.BytesIO(self.run.read(path))
            if _sha256(source) != manifest.sha256.get(file):
                raise ValueError(f"{file} is damaged")
            try:
                loaded.append(form.load(source))
            except Exception as error:  # the parsers raise arbitrary errors on foreign files
                raise ValueError(f"of another form: {type(error).__name__}: {error}") from error
        model, optimizer, scaler = loaded
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
    parts: list[Annotated[str, Field(pattern=r"^[0-9a-f]{8}-\d{5}$")]] = []


def _is_of(manifest: _Manifest, trace: Trace) -> bool:
    """Whether a checkpoint continues a training."""
    expected = trace(manifest.step)
    return expected is not None and manifest.trace == expected


def _joined(parts: Sequence[Checkpoint]) -> dict[str, Any]:
    """Return the state of the model and of the optimizer from the parts of all workers."""
    states = [part.optimizer["state"] for part in parts]
    optimizer = {name: _whole([each.get(name, {}) for each in states]) for name in states[0]}
    return {
        "model": _whole([part.model for part in parts]),
        "optimizer": {**parts[0].optimizer, "state": optimizer},
    }


def _whole(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values, joined if every worker has a part; else rank 0 has the value."""
    values = {name: [part[name] for part in parts if name in part] for name in parts[0]}
    return {name: Joined(found) if found[1:] else found[0] for name, found in values.items()}


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


def _sha256(source: str | io.BytesIO) -> str:
    if isinstance(source, io.BytesIO):
        return hashlib.sha256(source.getbuffer()).hexdigest()
    with Path(source).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_tensors(stream: _Hashing, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file tensor by tensor: the header with its length, then the values.

    ``safetensors.torch.save`` needs the memory of all tensors once more.
    """
    # larger types first, as safetensors does: every value is aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, end = {}, 0
    for name in names:
        value, begin = tensors[name], end
        end += value.numel() * value.itemsize
        of_type = json.loads(save_tensors({"": torch.empty(0, dtype=value.dtype)})[8:])
        about = {"shape": list(value.shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": of_type[""]["dtype"], **about}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        value = tensors[name].detach().cpu().contiguous().reshape(-1)
        stream.write(value.view(torch.uint8).numpy().data)


def _load_tensors(source: str | io.BytesIO) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = (
        load_tensors(source.getvalue()) if isinstance(source, io.BytesIO) else load_file(source)
    )
    return loaded


def _write_state(stream: _Hashing, state: Mapping[str, Any]) -> None:
    try:
        torch.save(state, cast("IO[bytes]", stream))
    except RuntimeError as error:  # torch could not end the file, and hides why it is incomplete
        raise (error.__context__ or error) from None


def _load_state(source: str | io.BytesIO) -> dict[str, Any]:
    mapped = isinstance(source, str)
    state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    return state


class _Form(NamedTuple):
    """How a file of a checkpoint is written and read."""

    write: Callable[[_Hashing, Any], None]
    load: Callable[[str | io.BytesIO], Any]


_FILES: Mapping[str, _Form] = {
    "model.safetensors": _Form(_write_tensors, _load_tensors),
    "optimizer.pt": _Form(_write_state, _load_state),
    "scaler.pt": _Form(_write_state, _load_state),
}
