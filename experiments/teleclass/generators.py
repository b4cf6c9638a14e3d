"""Generators of documents for starved classes, called by ``augment.generator``."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from raypipe import ConfigError


@dataclass(frozen=True)
class Assignment:
    """A class that a generator writes documents for.

    Attributes:
        name: the class's name, words separated by spaces.
        path: names from a root to the class, which is the last; one path if there are several.
        keywords: terms of the class, possibly none.
        siblings: names of the other classes below its parent.
        examples: documents labeled with the class, the most confident first, possibly none.
        documents: number of documents to write.
        seed: seed of random draws, different for each class.

    """

    name: str
    path: tuple[str, ...]
    keywords: tuple[str, ...]
    siblings: tuple[str, ...]
    examples: tuple[str, ...]
    documents: int
    seed: int


#: returns at most as many texts as the assignment asks for
Generator = Callable[[Assignment], list[str]]
FROM_KEYWORDS = "experiments.teleclass.generators:from_keywords"


def from_keywords(assignment: Assignment) -> list[str]:
    """Return texts of shuffled words: the class's path, its keywords and words of examples.

    No language model is needed; the texts are not fluent, but contain the words of the class.
    """
    draw = random.Random(assignment.seed)
    own = [*assignment.keywords, assignment.name] * 3
    near = [word for text in assignment.examples for word in text.split()[:200]]
    texts = []
    for _ in range(assignment.documents):
        words = [*assignment.path, *own, *draw.sample(near, min(len(near), 20))]
        draw.shuffle(words)
        texts.append(" ".join(word.replace("_", " ") for word in words))
    return texts


def load_generator(name: str) -> Generator:
    """Return the function at ``module:function``. Raises ConfigError if there is none."""
    if name == FROM_KEYWORDS:  # an installed package has this module under another name
        return from_keywords
    module, _, function = name.partition(":")
    try:
        generator = getattr(importlib.import_module(module), function)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"augment.generator = {name}: must be module:function, importable here "
            f"({type(error).__name__}: {error})"
        ) from error
    if not callable(generator):
        raise ConfigError(f"augment.generator = {name}: is not callable")
    return cast(Generator, generator)
