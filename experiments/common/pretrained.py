"""Fingerprint of a pretrained model, for the identity of units that use it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

#: files that decide the weights, the sizes and the tokens of a saved model
_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


@lru_cache(maxsize=8)  # a sweep asks for each of its trials, and weights take seconds to read
def model_fingerprint(model: str) -> str:
    """Return a model's name, or the SHA-256 of the files of its directory."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.rglob(pattern)}):
        digest.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
