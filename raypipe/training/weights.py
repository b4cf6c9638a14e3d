"""Trained weights as files: safetensors whose metadata hold the SHA-256 of everything else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from safetensors.torch import load, save
from torch import Tensor

from raypipe.errors import ConfigError
from raypipe.paths import RunDirectory

_SHA256 = "sha256"


def write_weights(
    run: RunDirectory, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write weights, all or nothing; each tensor lies on the CPU in memory of its own."""
    kept = dict(tensors)
    about = {**metadata, _SHA256: _digest(kept, metadata)}
    run.write(path, save(kept, metadata=about))


def read_weights(run: RunDirectory, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights on the CPU, and what was stored beside them.

    Raises:
        ConfigError: they are missing or damaged.

    """
    return _verified(run, path)[1]


def read_verified(run: RunDirectory, path: str) -> bytes:
    """The content of a file of weights.

    Raises:
        ConfigError: it is missing or damaged.

    """
    return _verified(run, path)[0]


def _verified(
    run: RunDirectory, path: str
) -> tuple[bytes, tuple[dict[str, Tensor], dict[str, str]]]:
    try:
        content = run.read(path)
        return content, parse_weights(content)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: a training's weights are missing or damaged ({error}); train them in another "
            "run directory"
        ) from error


def parse_weights(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and what was stored beside them. Raises ValueError: they are damaged."""
    try:
        tensors: dict[str, Tensor] = load(content)
        # a safetensors file begins with the length of its JSON header
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata: dict[str, str] = header.get("__metadata__", {})
        digest = metadata.pop(_SHA256, None)  # which files of others lack
    except Exception as error:  # the parser raises anything on foreign bytes
        raise ValueError(f"no safetensors file: {type(error).__name__}: {error}") from error
    if digest is not None and digest != _digest(tensors, metadata):
        raise ValueError("its content has another checksum")
    return tensors, metadata


def _digest(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Of names, types, shapes and values as safetensors orders them, and of the metadata."""
    beside = json.dumps(dict(metadata), sort_keys=True).encode()
    return hashlib.sha256(save(tensors) + beside).hexdigest()
