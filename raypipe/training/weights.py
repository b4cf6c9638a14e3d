"""Trained weights: safetensors files with a SHA-256 checksum in the metadata.

A training may start from the weights of another run. They are identified by the checksum in their
file, not by where they are. The command finds them without torch, which takes seconds to import.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor, nn

_SHA256, _METADATA, _SUFFIX = "sha256", "__metadata__", ".safetensors"
_LONGEST_MESSAGE = 2000
#: as safetensors has it; a header is some hundred bytes per tensor
_LONGEST_HEADER = 100_000_000


def write_weights(
    run: RunDirectory, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a copy of the weights atomically, wherever they are; they may share memory."""
    from safetensors.torch import save

    # safetensors rejects tensors that share memory, such as tied weights
    kept = {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()
    }
    digest = _digest(*_split(save(kept)), dict(metadata))
    run.write(path, save(kept, metadata={**metadata, _SHA256: digest}))


def read_weights(run: RunDirectory, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights, on the CPU, and their metadata.

    Raises:
        ConfigError: the weights are missing or damaged.

    """
    return parse_weights(read_verified(run, path))


def read_verified(run: RunDirectory, path: str) -> bytes:
    """Return the verified content of a weights file.

    Raises:
        ConfigError: the file is missing or damaged.

    """
    try:
        content = run.read(path)
        parse_weights(content)
        metadata_of(content)[_SHA256]
    except (OSError, ValueError, KeyError) as error:
        problem = "its checksum is missing" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{path}: a training's weights are missing or damaged ({problem}); train them in "
            "another run directory"
        ) from error
    return content


def parse_weights(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights and metadata of a safetensors file; foreign ones have no checksum.

    Raises:
        ValueError: the content is damaged.

    """
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(content)
        header, values = _split(content)
        metadata: dict[str, str] = header.pop(_METADATA, {})
        digest = metadata.pop(_SHA256, None)
    except Exception as error:  # the parser raises arbitrary errors on foreign bytes
        raise ValueError(f"no safetensors file: {type(error).__name__}: {error}") from error
    if digest not in (None, _digest(header, values, metadata)):
        raise ValueError("its content has another checksum")
    return tensors, metadata


def metadata_of(content: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file, without its weights.

    Raises:
        ValueError: it is not a safetensors file.

    """
    return dict(_split(content)[0].get(_METADATA, {}))


@dataclass(frozen=True)
class InitialWeights:
    """A model in a run directory, from which a training starts.

    Args:
        key: the configuration key that asked for it, for messages.
        run: the run directory.
        name: the training run, which is a stage or one of its variants.
        sha256: the checksum of the weights.
        shapes: the shape of each tensor.

    """

    key: str
    run: RunDirectory
    name: str
    sha256: str
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def shown(self) -> str:
        """The run directory and the training, without credentials."""
        return f"{self.run.shown}/{self.name}"

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if a model, which has no values (meta device), has other weights."""
        import torch

        shapes = self.shapes.items()
        self._load(model, {name: torch.empty(shape, device="meta") for name, shape in shapes})

    def load_into(self, model: nn.Module) -> None:
        """Give a model these weights.

        Raises:
            ConfigError: they are missing, damaged or not those that were found before, or do not
                fit.

        """
        content = read_verified(self.run, self.run.model(self.name))
        if metadata_of(content)[_SHA256] != self.sha256:
            raise ConfigError(f"{self.key} = {self.shown}: changed since the command started")
        self._load(model, parse_weights(content)[0])

    def _load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:  # it names the weights
            raise ConfigError(
                f"{self.key} = {self.shown}: its weights do not fit the model; give a model of "
                f"the same settings:\n{str(error)[:_LONGEST_MESSAGE]}"
            ) from error


def find(location: str, stage: str, key: str) -> InitialWeights:
    """Return the weights at ``RUN_DIR`` or ``RUN_DIR/STAGE``; only the head of the file is read.

    Args:
        location: the run directory, a path or URI; a stage, or a variant of one, may follow.
        stage: the stage if none follows.
        key: the configuration key, for messages.

    Raises:
        ConfigError: there is no such model; the message has the models that exist.

    """
    try:
        run, name = _place(location, stage)
        models = _models(run)
        header = _header(run, run.model(name)) if name in models else None
    except ConfigError as error:
        raise ConfigError(str(error).replace("--run-dir", f"{key} =")) from error
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise ConfigError(f"{key}: the model cannot be read: {error}") from error
    shown = f"{key} = {run.shown}"
    if header is None:
        having = f"it has {', '.join(models)}" if models else "it has none"
        raise ConfigError(
            f"{shown}: there is no trained model {name!r} in this run directory ({having}); give "
            "RUN_DIR or RUN_DIR/STAGE of a finished training"
        )
    digest = header.pop(_METADATA, {}).get(_SHA256)
    if digest is None:
        raise ConfigError(f"{shown}: {name}: its checksum is missing; train it again")
    shapes = {tensor: tuple(about["shape"]) for tensor, about in header.items()}
    return InitialWeights(key, run, name, digest, shapes)


def _place(location: str, stage: str) -> tuple[RunDirectory, str]:
    """Return the run directory and the stage that a location names."""
    run = RunDirectory.at(location)
    if _models(run):
        return run, stage
    folder, _, last = run.location.rpartition("/")
    above = RunDirectory.at(folder)
    is_above = bool(_models(above)) or above.exists(above.ledger)
    return (above, last) if is_above else (run, stage)


def _models(run: RunDirectory) -> list[str]:
    """Return the names of the trained models in a run directory."""
    names = run.list(run.path("models"))
    return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]


def _header(run: RunDirectory, path: str) -> dict[str, Any]:
    """Return the header of a safetensors file: 8 bytes with its length, then JSON."""
    with run.fs.open_input_stream(path) as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError("it is not a safetensors file")
        header = json.loads(bytes(stream.read(size)))
    if not isinstance(header, dict):
        raise TypeError("its header is damaged")
    return header


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a safetensors file (8-byte length, then JSON) and all values."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), memoryview(content)[end:]


def _digest(header: Mapping[str, Any], values: memoryview, metadata: Mapping[str, str]) -> str:
    """Return the checksum of the header (names, types, shapes, offsets), values and metadata."""
    digest = hashlib.sha256(json.dumps([header, metadata], sort_keys=True).encode())
    digest.update(values)
    return digest.hexdigest()
