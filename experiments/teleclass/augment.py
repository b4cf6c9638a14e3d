"""Phase 3, augment: write documents for the classes that have too few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.teleclass.artifacts import label_matrix, pool_options, pseudo_labels_path
from experiments.teleclass.corpus import LabeledCorpus, read_annotations
from experiments.teleclass.documents import Documents, read_documents
from experiments.teleclass.generators import Assignment, load_generator
from experiments.teleclass.settings import AugmentSettings, TeleclassDataSettings
from raypipe import StageContext, artifacts

_EXAMPLES = 3


def run_augment(corpus: LabeledCorpus, context: StageContext) -> None:
    """Write documents for the starved classes into the table ``generated``, and count classes.

    A class is starved if it has too few documents, counting the ancestors of labels.

    Raises:
        UnitError: a generator failed; documents that others wrote are kept.

    """
    settings, taxonomy = context.settings.augment, corpus.taxonomy
    unit, ledger = context.stage.units[0].fingerprint, context.ledger
    stale = [key for key, row in ledger.items("generated") if row.get("unit") != unit]
    ledger.remove("generated", stale)  # an interrupted command wrote them with other settings
    stored = artifacts.read_parquet(context.run_dir, pseudo_labels_path(context.run_dir))
    labels = taxonomy.closure(label_matrix(stored.column("labels"), len(taxonomy))).tocsc()
    sizes = np.diff(labels.indptr)
    starved = np.flatnonzero(sizes < settings.starved_below).tolist()
    labeled = int((np.diff(labels.tocsr().indptr) > 0).sum())
    number = documents_per_class(settings, len(starved), labeled)
    if settings.source == "files":
        _from_files(corpus, context, starved, number)
    elif settings.source == "generator" and starved:
        confidence = stored.column("confidence").to_numpy()
        members = np.split(labels.indices, labels.indptr[1:-1])
        surest = {
            c: members[c][np.argsort(-confidence[members[c]], kind="stable")] for c in starved
        }
        _from_generator(corpus, context, surest, number)
    generated = ledger.rows("generated")
    written = np.bincount([row["class_index"] for row in generated], minlength=len(sizes))
    gold = None if corpus.train.gold is None else np.asarray(corpus.train.gold.sum(axis=0)).ravel()
    ledger.put(
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


def documents_per_class(settings: AugmentSettings, starved: int, labeled: int) -> int:
    """Return how many documents each of the starved classes gets, given the labeled documents."""
    if settings.max_share is None:
        return settings.documents
    most = int(settings.max_share * labeled) // max(1, starved)
    return max(1, min(settings.documents, most))


def generated_files(
    data: TeleclassDataSettings, corpus: LabeledCorpus, settings: AugmentSettings
) -> tuple[Documents, dict[str, list[int]]]:
    """Return the documents of ``augment.source = files`` and their classes.

    Raises:
        CorpusError: a file is missing or cannot be used.

    """
    folder = data.dir or Path()
    texts = read_documents(folder / settings.texts, corpus.taxonomy)
    return texts, read_annotations(folder / settings.labels, corpus.taxonomy)


def _from_files(
    corpus: LabeledCorpus, context: StageContext, starved: Sequence[int], number: int
) -> None:
    settings = context.settings.augment
    documents, classes = generated_files(context.settings.data, corpus, settings)
    texts: dict[int, list[str]] = {c: [] for c in starved}
    for name, text in zip(documents.ids.to_pylist(), documents.texts.to_pylist(), strict=True):
        for c in classes.get(name, []):
            if c in texts and len(texts[c]) < number:
                texts[c].append(text)
    rows = [_rows(corpus, context, c, own) for c, own in texts.items()]
    context.ledger.put("generated", {key: row for part in rows for key, row in part.items()})


def _from_generator(
    corpus: LabeledCorpus, context: StageContext, surest: dict[int, Any], number: int
) -> None:
    """Write documents for classes, given the rows of their documents, most confident first."""
    settings = context.settings.augment
    done = {row["class_index"] for row in context.ledger.rows("generated")}
    context.begin(len(surest), len(done))

    def calls() -> Iterator[tuple[int, Any, str, Assignment]]:
        for c in [c for c in surest if c not in done]:
            examples = corpus.train.texts.take(surest[c][:_EXAMPLES]).to_pylist()
            assignment = _assignment(corpus, settings.seed, c, tuple(examples), number)
            yield c, _write, settings.generator, assignment

    with context.pool(pool_options(context, settings, neural=False)) as pool:
        for c, texts in context.map(pool, calls()):
            context.ledger.put("generated", _rows(corpus, context, c, texts))
            done.add(c)
            context.advance(len(done))


def _assignment(
    corpus: LabeledCorpus, seed: int, c: int, examples: tuple[str, ...], documents: int
) -> Assignment:
    taxonomy = corpus.taxonomy
    names = [name.replace("_", " ") for name in taxonomy.names]
    path, siblings = [c], []
    while parents := taxonomy.parents[path[0]]:
        path.insert(0, parents[0])
    if len(path) > 1:
        siblings = [names[s] for s in taxonomy.children[path[-2]] if s != c]
    return Assignment(
        names[c],
        tuple(names[p] for p in path),
        taxonomy.keywords[c],
        tuple(siblings),
        examples,
        documents,
        seed * len(names) + c,
    )


def _write(generator: str, assignment: Assignment) -> list[str]:
    """Task: return the documents that a generator writes for a class."""
    texts = load_generator(generator)(assignment)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{generator} must return a list of texts, not {texts!r:.200}")
    return [text for text in texts if text.strip()][: assignment.documents]


def _rows(
    corpus: LabeledCorpus, context: StageContext, c: int, texts: list[str]
) -> dict[str, dict[str, Any]]:
    about = {"class_index": c, "class": corpus.taxonomy.ids[c], "name": corpus.taxonomy.names[c]}
    about["unit"] = context.stage.units[0].fingerprint
    return {
        f"{c}/{number}": {**about, "number": number, "text": text}
        for number, text in enumerate(texts)
    }
