"""Phase 3: classes with too few documents get documents that are written for them."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from experiments.teleclass.artifacts import label_matrix
from experiments.teleclass.data.annotations import read_annotations
from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.data.documents import Documents, read_documents
from experiments.teleclass.refine import pseudo_labels_path
from experiments.teleclass.settings import AugmentSettings, DataSettings
from experiments.teleclass.tasks import pool_options
from raypipe.errors import ConfigError
from raypipe.pipeline.context import Call, StageContext
from raypipe.storage.artifacts import read_parquet
from raypipe.storage.ledger import Row

_EXAMPLES = 3


@dataclass(frozen=True)
class Assignment:
    """What a generator writes for: a class.

    Attributes:
        name: of the class, words separated by spaces.
        path: names from a root to the class, itself the last; one of them where there are several.
        keywords: terms of the class, possibly none.
        siblings: names of the other classes below its parent.
        examples: texts of documents that were labelled with it, the surest first, possibly none.
        documents: how many texts are asked for.
        seed: decides any draw, another one for each class.

    """

    name: str
    path: tuple[str, ...]
    keywords: tuple[str, ...]
    siblings: tuple[str, ...]
    examples: tuple[str, ...]
    documents: int
    seed: int


#: returns as many texts as the assignment asks for, or fewer
Generator = Callable[[Assignment], list[str]]


def from_keywords(assignment: Assignment) -> list[str]:
    """Texts of the words that are known of a class: its path, its keywords, words of examples.

    No model writes them; they read badly, but say which words a class goes with.
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
    """The function at ``module:function``. Raises ConfigError where there is none."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"augment.generator = {name}: must be module:function, importable here "
            f"({type(error).__name__}: {error})"
        ) from error
    if not callable(found):
        raise ConfigError(f"augment.generator = {name}: is not callable")
    generator: Generator = found
    return generator


def augment(
    context: StageContext, data: DataSettings, corpus: Corpus, settings: AugmentSettings
) -> None:
    """Write documents for the starved classes into the table ``generated``, and count classes.

    A class is starved that, ancestors of labels counted, has too few documents.

    Raises:
        UnitError: a generator failed; what the others wrote is kept.

    """
    taxonomy = corpus.taxonomy
    stored = read_parquet(context.run_dir, pseudo_labels_path(context.run_dir))
    direct = label_matrix(stored.column("labels"), len(taxonomy.ids))
    labels = taxonomy.closure(direct).tocsc()
    sizes = np.diff(labels.indptr)
    starved = np.flatnonzero(sizes < settings.starved_below)
    if settings.source == "files":
        _from_files(context, data, corpus, settings, starved)
    elif settings.source == "generator" and len(starved):
        confidence = stored.column("confidence").to_numpy()
        _from_generator(context, corpus, settings, labels, confidence, starved)
    generated = context.ledger.rows("generated")
    written = np.bincount([row["class_index"] for row in generated], minlength=len(sizes))
    gold = None if corpus.train.gold is None else np.asarray(corpus.train.gold.sum(axis=0)).ravel()
    context.ledger.put(
        "classes",
        {
            taxonomy.ids[c]: {
                "class": taxonomy.ids[c],
                "name": taxonomy.names[c],
                "level": int(taxonomy.depth[c]),
                "documents": int(sizes[c]),
                "generated": int(written[c]),
                "gold": None if gold is None else int(gold[c]),
            }
            for c in range(len(sizes))
        },
    )
    short = int((written[starved] == 0).sum())
    context.say(
        f"{len(starved)} of {len(sizes)} classes have fewer than {settings.starved_below} "
        f"documents; {len(generated)} were written, for all but {short} of them"
    )


def _from_files(
    context: StageContext,
    data: DataSettings,
    corpus: Corpus,
    settings: AugmentSettings,
    starved: np.ndarray[Any, np.dtype[np.int64]],
) -> None:
    texts, labels = generated_files(data, corpus, settings)
    written: dict[int, list[str]] = {int(c): [] for c in starved}
    for name, text in zip(texts.ids.to_pylist(), texts.text_list(0, len(texts)), strict=True):
        for c in labels.get(name, []):
            if c in written and len(written[c]) < settings.documents:
                written[c].append(text)
    rows = [_rows(corpus, c, each) for c, each in written.items()]
    context.ledger.put("generated", {key: row for part in rows for key, row in part.items()})


def generated_files(
    data: DataSettings, corpus: Corpus, settings: AugmentSettings
) -> tuple[Documents, dict[str, list[int]]]:
    """The written documents of ``augment.source = files`` and their classes.

    Raises:
        CorpusError: a file that is missing or cannot be used.

    """
    folder = data.dir or Path()
    texts = read_documents(folder / settings.texts, corpus.taxonomy)
    return texts, read_annotations(folder / settings.labels, corpus.taxonomy)


def _from_generator(
    context: StageContext,
    corpus: Corpus,
    settings: AugmentSettings,
    labels: Any,
    confidence: np.ndarray[Any, np.dtype[np.float32]],
    starved: np.ndarray[Any, np.dtype[np.int64]],
) -> None:
    done = {row["class_index"] for row in context.ledger.rows("generated")}
    context.begin(len(starved), len(done))

    def calls() -> Iterator[Call]:
        for c in starved.tolist():
            if c in done:
                continue
            rows = labels.indices[labels.indptr[c] : labels.indptr[c + 1]]
            surest = rows[np.argsort(-confidence[rows], kind="stable")][:_EXAMPLES]
            examples = corpus.train.take(surest).text_list(0, len(surest))
            assignment = _assignment(corpus, settings, c, tuple(examples))
            yield f"augment/{c}", _write, settings.generator, assignment

    with context.pool(pool_options(context, settings, neural=False)) as pool:
        for name, texts in context.map(pool, calls()):
            c = int(name.rpartition("/")[2])
            context.ledger.put("generated", _rows(corpus, c, texts))
            done.add(c)
            context.advance(len(done))


def _assignment(
    corpus: Corpus, settings: AugmentSettings, c: int, examples: tuple[str, ...]
) -> Assignment:
    taxonomy = corpus.taxonomy
    names = [name.replace("_", " ") for name in taxonomy.names]
    path, siblings = [c], []
    while len(parents := taxonomy.parents[path[0]]):
        path.insert(0, int(parents[0]))
    if len(path) > 1:
        siblings = [names[s] for s in taxonomy.children[path[-2]] if s != c]
    return Assignment(
        names[c],
        tuple(names[p] for p in path),
        taxonomy.keywords[c],
        tuple(siblings),
        examples,
        settings.documents,
        settings.seed * len(names) + c,
    )


def _write(generator: str, assignment: Assignment) -> list[str]:
    """Task: what a generator writes for a class."""
    texts = load_generator(generator)(assignment)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{generator} must return a list of texts, not {texts!r:.200}")
    return [text for text in texts if text.strip()][: assignment.documents]


def _rows(corpus: Corpus, c: int, texts: list[str]) -> dict[str, Row]:
    about = {"class_index": c, "class": corpus.taxonomy.ids[c], "name": corpus.taxonomy.names[c]}
    return {
        f"{c}/{number}": {**about, "number": number, "text": text}
        for number, text in enumerate(texts)
    }


def generated_documents(context: StageContext) -> tuple[pa.Array, list[int]]:
    """The texts that were written, and the class of each, class by class."""
    rows = context.ledger.rows("generated")
    rows.sort(key=lambda row: (row["class_index"], row["number"]))
    texts = pa.array([row["text"] for row in rows], pa.large_string())
    return texts, [int(row["class_index"]) for row in rows]
