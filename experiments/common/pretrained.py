"""Pretrained models of Hugging Face's ``transformers``: checks, identity, tokenizer, export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe import ConfigError, RunDirectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

#: files that decide the weights, the sizes and the tokens of a saved model
_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


def require_libraries(what: str, *modules: str) -> None:
    """Reject what needs optional libraries that are not installed. Raises ConfigError."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(f"{what}: needs {module}; pip install 'raypipe-runner[nlp]'")


def check_saved_model(model: str, what: str) -> None:
    """Reject a directory that is missing or holds no model. Raises ConfigError."""
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{what}: holds no config.json, so it is not a saved model")
    elif folder.is_absolute() or model.startswith("."):
        raise ConfigError(f"{what}: there is no such directory")


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


@lru_cache(maxsize=4)  # a sweep builds the stages of every trial
def load_fast_tokenizer(model: str, what: str) -> Any:
    """Return a model's tokenizer. Raises ConfigError if it has no fast one."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{what}: its tokenizer cannot be loaded: {error}") from error
    # for a folder without a tokenizer the library returns one that knows the white space alone
    if not loaded.is_fast or len(loaded) <= len(loaded.all_special_tokens) + 1:
        raise ConfigError(f"{what}: has no fast tokenizer; take a model with a tokenizer.json")
    return loaded


def save_model(
    run_dir: RunDirectory,
    folder: str,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    tokenizer_config: Mapping[str, Any],
    configs: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write a model and its tokenizer to a folder that ``transformers`` reads.

    Args:
        run_dir: the run directory.
        folder: a path of its file system.
        weights: by the library's names.
        tokenizer: of the library ``tokenizers``.
        tokenizer_config: its special tokens, and other keys of ``tokenizer_config.json``.
        configs: further JSON files by name, such as ``config.json``.

    """
    from safetensors.torch import save

    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # a special token that is spelled out in a text is text
        "split_special_tokens": True,
        **tokenizer_config,
    }
    files = {
        "model.safetensors": save(dict(weights), metadata={"format": "pt"}),
        "tokenizer.json": tokenizer.to_str().encode(),
    }
    for name, content in {**configs, "tokenizer_config.json": about}.items():
        files[name] = (json.dumps(content, indent=2) + "\n").encode()
    for name, data in files.items():
        run_dir.write(f"{folder}/{name}", data)
