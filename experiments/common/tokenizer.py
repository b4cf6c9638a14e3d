"""Tokenizers as JSON of the library ``tokenizers``: training data, storage, reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from raypipe.errors import ConfigError
from raypipe.graph.context import StageContext
from raypipe.store.run_directory import RunDirectory

T = TypeVar("T")


def evenly_spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` items, at equal distances from the first to the last.

    A tokenizer that is trained on the beginning of a sorted file has a biased vocabulary.
    """
    return items[:: max(1, -(-len(items) // most))]


def tokenizer_path(run_dir: RunDirectory, stage: str = "tokenize") -> str:
    """Return the path of the tokenizer that a stage stores."""
    return run_dir.artifact(stage, "tokenizer.json")


def store_tokenizer(context: StageContext, make: Callable[..., str], *arguments: object) -> str:
    """Make a tokenizer in a task, store it, and return it as JSON."""
    content: str = context.call(f"{context.stage.name}/tokenizer", make, *arguments)
    path = tokenizer_path(context.run_dir, context.stage.name)
    context.run_dir.write(path, content.encode())
    return content


def read_tokenizer(run_dir: RunDirectory) -> str:
    """Return the stored tokenizer as JSON. Raises ConfigError if it is missing."""
    path = tokenizer_path(run_dir)
    try:
        return run_dir.read(path).decode()
    except OSError as error:
        raise ConfigError(
            f"{path}: the result of the tokenize stage is missing ({error}); run the configuration "
            "in another run directory"
        ) from error
