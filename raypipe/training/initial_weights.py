"""Initial weights: the trained model of another run, from which a training starts.

The weights are identified by the checksum in their file, not by where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory

if TYPE_CHECKING:  # the command finds weights without torch, which takes seconds to import
    from torch import nn

_SUFFIX = ".safetensors"
_MOST_SHOWN = 5
#: a header is some hundred bytes per tensor
_LONGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class InitialWeights:
    """A model in a run directory.

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

    def check(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Raise ConfigError, with the names, if a model has other weights than these."""
        mistakes = {
            "missing in the file": [name for name in expected if name not in self.shapes],
            "unknown to the model": [name for name in self.shapes if name not in expected],
            "of another shape": [
                f"{name} ({list(self.shapes[name])} instead of {list(shape)})"
                for name, shape in expected.items()
                if name in self.shapes and self.shapes[name] != tuple(shape)
            ],
        }
        lines = [f"  {what}: {_some(names)}" for what, names in mistakes.items() if names]
        if lines:
            raise ConfigError(
                f"{self.key} = {self.shown}: its weights do not fit the model; give a model of "
                "the same settings:\n" + "\n".join(lines)
            )

    def load_into(self, model: nn.Module) -> None:
        """Give a model these weights.

        Raises:
            ConfigError: they are missing, damaged or not those that were found before, or do not
                fit.

        """
        from raypipe.training.weights import read_weights

        found = find(self.run.location, self.name, self.key, is_run=True)
        if found.sha256 != self.sha256:
            raise ConfigError(f"{self.key} = {self.shown}: changed since the command started")
        self.check({name: tensor.shape for name, tensor in model.state_dict().items()})
        weights, _ = read_weights(self.run, self.run.model(self.name))
        model.load_state_dict(weights)


def find(location: str, stage: str, key: str, *, is_run: bool = False) -> InitialWeights:
    """Return the weights at ``RUN_DIR`` or ``RUN_DIR/STAGE``; only the head of the file is read.

    Args:
        location: the run directory, a path or URI; a stage, or a variant of one, may follow.
        stage: the stage if none follows.
        key: the configuration key, for messages.
        is_run: whether no stage follows.

    Raises:
        ConfigError: there is no such model; the message has the models that exist.

    """
    try:
        run, name = _place(location, stage, is_run=is_run)
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
    digest = header.pop("__metadata__", {}).get("sha256")
    if digest is None:
        raise ConfigError(f"{shown}: {name}: its checksum is missing; train it again")
    shapes = {tensor: tuple(about["shape"]) for tensor, about in header.items()}
    return InitialWeights(key, run, name, digest, shapes)


def _place(location: str, stage: str, *, is_run: bool) -> tuple[RunDirectory, str]:
    """Return the run directory and the stage that a location names."""
    run = RunDirectory.at(location)
    if is_run or _models(run):
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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more
