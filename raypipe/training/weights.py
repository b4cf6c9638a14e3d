"""Trained weights as safetensors files with a SHA-256 checksum in the metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory

_SHA256 = "sha256"


def write_weights(
    run: RunDirectory, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write weights atomically; the tensors must be on the CPU and must not share memory."""
    kept = dict(tensors)
    digest = _digest(*_split(save(kept)), dict(metadata))
    run.write(path, save(kept, metadata={**metadata, _SHA256: digest}))


def read_weights(run: RunDirectory, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights, on the CPU, and their metadata.

    Raises:
        ConfigError: the weights are missing or damaged.

    """
    return _verified(run, path)[1]


def read_verified(run: RunDirectory, path: str) -> bytes:
    """Return the verified content of a weights file.

    Raises:
        ConfigError: the file is missing or damaged.

    """
    return _verified(run, path)[0]


def _verified(
    run: RunDirectory, path: str
) -> tuple[bytes, tuple[dict[str, Tensor], dict[str, str]]]:
    try:
        content = run.read(path)
        return content, parse_weights(content, own=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: a training's weights are missing or damaged ({error}); train them in another "
            "run directory"
        ) from error


def parse_weights(content: bytes, *, own: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights and metadata of a safetensors file.

    Args:
        content: the content of the file.
        own: whether :func:`write_weights` wrote the file; foreign files have no checksum.

    Raises:
        ValueError: the content is damaged.

    """
    try:
        tensors: dict[str, Tensor] = load(content)
        header, values = _split(content)
        metadata: dict[str, str] = header.pop("__metadata__", {})
        digest = metadata.pop(_SHA256, None)
    except Exception as error:  # the parser raises arbitrary errors on foreign bytes
        raise ValueError(f"no safetensors file: {type(error).__name__}: {error}") from error
    if digest is None:
        if own:
            raise ValueError("its checksum is missing")
    elif digest != _digest(header, values, metadata):
        raise ValueError("its content has another checksum")
    return tensors, metadata


def metadata_of(content: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file, without its weights.

    Raises:
        ValueError: it is not a safetensors file.

    """
    metadata: dict[str, str] = _split(content)[0].get("__metadata__", {})
    return metadata


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a safetensors file (8-byte length, then JSON) and all values."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), memoryview(content)[end:]


def _digest(header: Mapping[str, Any], values: memoryview, metadata: Mapping[str, str]) -> str:
    """Return the checksum of the header (names, types, shapes, offsets), values and metadata."""
    digest = hashlib.sha256(json.dumps([header, metadata], sort_keys=True).encode())
    digest.update(values)
    return digest.hexdigest()
