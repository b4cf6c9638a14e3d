"""Objective of a study: a function of the topics and priors of one corpus, and its identity.

It fits topic models, or looks up recorded perplexities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype
from sklearn.model_selection import train_test_split

from experiments.common.corpora.corpus import Corpus, CorpusError, make_corpus
from experiments.common.corpora.load import load_corpus
from experiments.pabbo_lda.objective import LdaFit, ObjectiveName
from experiments.pabbo_lda.space import FloatArray, IntArray, Point
from raypipe import ConfigError, fingerprint

if TYPE_CHECKING:  # torch comes with the settings of PABBO
    from experiments.pabbo_lda.settings import CorporaSettings, LdaSettings

#: CPU seconds per pass and count: a constant, and a part per topic (measured on one core)
_PASS_S, _TOPIC_S = 1.3e-7, 2e-9
#: Length of an evaluation, in seconds, that gets a whole CPU; about a shorter one the driver and
#: Ray do as much. Smaller shares make more processes than cores, and each first loads its
#: packages (1.6 s).
_WHOLE_CPU_S = 0.02
_HELD_OUT = 0.2
#: objectives that one document does not have
_SEVERAL = ("heldout_perplexity", "coherence")
#: share of the letters in no token from which a user should know: of English words about 0.1
_MANY_SKIPPED = 0.25
_TOKENS = (
    r"a word has three letters or more; change that by data.options.word_pattern, such as '\w{2,}'"
)


@dataclass(frozen=True)
class CorpusObjective:
    """A function of (point, seed) on one corpus; smaller is better.

    Attributes:
        dataset: the name of the corpus.
        kind: its name in the configuration.
        data_fingerprints: the fingerprints of the data, by role.
        data: the first argument of its function, shared by all tasks.
        fit: the options of fitting; None where values are recorded.
        counts: nonzero counts of the documents times passes over them.
        corpus: the documents; None where values are recorded.

    """

    dataset: str
    kind: ObjectiveName
    data_fingerprints: Mapping[str, str]
    data: Any = field(repr=False)
    fit: LdaFit | None = None
    counts: int = 0
    corpus: Corpus | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of its function after the data, the point and the seed."""
        return (self.dataset,) if self.fit is None else (self.fit,)

    def function(self) -> Callable[..., float]:
        """Return ``function(data, point, seed, *arguments)``; the call compiles it."""
        if self.kind == "tabular":
            return tabular_value
        from experiments.pabbo_lda.objective import topic_model

        functions = {
            "perplexity": topic_model.lda_perplexity,
            "heldout_perplexity": topic_model.lda_heldout_perplexity,
            "coherence": topic_model.lda_incoherence,
        }
        return functions[self.kind]

    @property
    def size(self) -> dict[str, Any]:
        """The row of the table ``corpora``; empty where values are recorded."""
        if self.corpus is None:
            return {}
        names = ("documents", "dropped_documents", "empty_documents", "words", "tokens")
        return {"dataset": self.dataset} | {name: getattr(self.corpus, name) for name in names}

    def notes(self) -> list[str]:
        """Return the size of the corpus in words, and what of it the studies do not see."""
        if (corpus := self.corpus) is None:
            return []
        dropped, empty, kept = (
            corpus.dropped_documents, corpus.empty_documents, corpus.documents
        )  # fmt: skip
        notes = [
            f"corpus {self.dataset}: documents {kept}, words {corpus.words}, tokens {corpus.tokens}"
        ]
        warnings = {
            f"{dropped} of {kept + dropped} documents have no word of the vocabulary and are left "
            "out": dropped,
            f"{empty} of {kept} documents have no word; they are kept": empty,
            f"{corpus.skipped_letters:.0%} of the letters are in no word: {_TOKENS}":
                corpus.skipped_letters > _MANY_SKIPPED,
        }  # fmt: skip
        return notes + [
            f"WARNING: corpus {self.dataset}: {text}" for text, holds in warnings.items() if holds
        ]

    def key(self, point: Point, seed: int) -> str:
        """Return the same key for equal evaluations, in every study and every run directory."""
        fit = {} if self.fit is None else self.fit._asdict()
        decisive = {"objective": self.kind, **self.data_fingerprints, **fit}
        return fingerprint({**decisive, "seed": seed, **point.given})

    def cost_s(self, point: Point) -> float:
        """Return about the CPU seconds of an evaluation; used to order evaluations."""
        return self.counts * (_PASS_S + _TOPIC_S * point.T)

    def cpus(self, point: Point) -> float:
        """Return the share of a CPU: a whole one, or less for a short evaluation."""
        return min(1.0, max(0.25, round(4 * self.cost_s(point) / _WHOLE_CPU_S) / 4))


def load_objectives(data: CorporaSettings, lda: LdaSettings) -> list[CorpusObjective]:
    """Return the objective on each corpus of the settings.

    Raises:
        ConfigError: a corpus or a table that cannot be used, or a range of T beyond a corpus.

    """
    if lda.table is not None:
        return _tabular(lda.table, lda)
    return [_of_corpus(name, data, lda) for name in lda.datasets]


def _of_corpus(name: str, data: CorporaSettings, lda: LdaSettings) -> CorpusObjective:
    corpus = _load(name, data)
    if lda.objective in _SEVERAL and corpus.documents < 2:
        raise ConfigError(
            f"lda.objective = {lda.objective}: the corpus {name} has one document, and this value "
            "is about several; give more documents, or objective=perplexity"
        )
    corpora = {"corpus": corpus}
    if lda.objective == "heldout_perplexity":
        corpora = _split(name, data, corpus)
    words = min(part.words for part in corpora.values())
    if lda.t_max > words:
        hint = f"; {_TOKENS}" if data.source != "bow" else ""
        raise ConfigError(
            f"lda.t_max = {lda.t_max}: the corpus {name} has only {words} words; "
            f"T must lie in [2, words]{hint}"
        )
    fitted, *held_out = (part.counts for part in corpora.values())
    return CorpusObjective(
        name,
        lda.objective,
        {role: part.fingerprint for role, part in corpora.items()},
        (fitted, *held_out) if held_out else fitted,
        LdaFit(lda.max_iter, lda.batch_size, lda.precision),
        fitted.nnz * lda.max_iter,
        corpus,
    )


def _load(name: str, data: CorporaSettings, **options: Any) -> Corpus:
    try:
        return load_corpus(data.source, name, data.dir, **{**data.options, **options})
    except CorpusError as error:
        raise CorpusError(f"lda.datasets = {name}: {error}") from error


def _split(name: str, data: CorporaSettings, corpus: Corpus) -> dict[str, Corpus]:
    """Return the training and held-out documents: the files' parts, else a random fifth."""
    if data.source == "bow":
        train, held_out = _load(name, data, split="train"), _load(name, data, split="val")
        if train.words != held_out.words:
            raise ConfigError(
                f"lda.objective = heldout_perplexity: the parts train and val of {name} have "
                f"{train.words} and {held_out.words} words; they must share a vocabulary"
            )
    else:
        parts = train_test_split(corpus.counts, test_size=_HELD_OUT, random_state=0)
        train, held_out = (make_corpus(name, part, source=name) for part in parts)
    return {"corpus": train, "held_out": held_out}


def _tabular(path: Path, lda: LdaSettings) -> list[CorpusObjective]:
    try:
        table = TabularObjective.read(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"lda.table = {path}: {error}") from error
    needed = {(name, lda.seed + run) for name in lda.datasets for run in range(lda.runs)}
    if missing := sorted(needed - {*table.runs}):
        known = ", ".join(sorted({dataset for dataset, _ in table.runs}))
        raise ConfigError(
            f"lda.table = {path}: has no values of dataset and seed {missing[0]}; "
            f"its datasets are {known}"
        )
    return [
        CorpusObjective(name, "tabular", {"corpus": table.fingerprint(name)}, table)
        for name in lda.datasets
    ]


class TabularObjective:
    """Recorded values of the objective, looked up and interpolated.

    Between recorded T the logarithm of the value is interpolated linearly in log T (values grow to
    1e44); beyond the largest recorded T the value of that T holds.

    Args:
        table: columns dataset, seed, T and perplexity, one row for each recorded value.

    Raises:
        ValueError: a column is missing or not numeric, or a perplexity is not positive and finite.

    """

    def __init__(self, table: pd.DataFrame) -> None:
        missing = {"dataset", "seed", "T", "perplexity"} - set(table.columns)
        if missing:
            raise ValueError(f"the table of evaluations lacks the columns {sorted(missing)}")
        for name in ("seed", "T", "perplexity"):
            if not is_numeric_dtype(table[name]):
                raise ValueError(f"the table of evaluations holds a {name} that is not a number")
        if not table["perplexity"].between(0, np.inf, inclusive="neither").all():
            raise ValueError("the table of evaluations holds perplexities that are not positive")
        self._curves: dict[tuple[str, int], tuple[IntArray, FloatArray]] = {}
        table = table.sort_values("T")
        key: Any
        for key, rows in table.groupby(["dataset", "seed"]):
            dataset, seed = key
            points, values = rows["T"].to_numpy(np.int64), rows["perplexity"].to_numpy(np.float64)
            self._curves[str(dataset), int(seed)] = points, values

    @classmethod
    def read(cls, path: Path) -> TabularObjective:
        """Return the objective recorded in a CSV file such as ``evaluations.csv.gz``."""
        return cls(pd.read_csv(path))

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """The pairs (dataset, seed) that have values, ascending."""
        return tuple(sorted(self._curves))

    def fingerprint(self, dataset: str) -> str:
        """Return the hash of all recorded values of a dataset."""
        curves = [
            (seed, points.tolist(), values.tolist())
            for (name, seed), (points, values) in sorted(self._curves.items())
            if name == dataset
        ]
        return fingerprint({"dataset": dataset, "curves": curves})

    def value(self, dataset: str, seed: int, T: int) -> float:
        """Return the recorded or interpolated perplexity.

        Raises:
            ValueError: a dataset and seed without values.

        """
        points, values = self._curve(dataset, seed)
        at = int(np.searchsorted(points, T))
        if at < len(points) and points[at] == T:  # exactly as recorded
            return float(values[at])
        return float(np.exp(np.interp(np.log(T), np.log(points), np.log(values))))

    def best(self, dataset: str, seed: int) -> tuple[int, float]:
        """Return the T of the smallest recorded value, and that value."""
        points, values = self._curve(dataset, seed)
        return int(points[values.argmin()]), float(values.min())

    def _curve(self, dataset: str, seed: int) -> tuple[IntArray, FloatArray]:
        try:
            return self._curves[dataset, seed]
        except KeyError:
            raise ValueError(
                f"dataset {dataset!r}, seed {seed}: no recorded values; recorded are {self.runs}"
            ) from None


def tabular_value(
    table: TabularObjective, point: Sequence[float], seed: int, dataset: str
) -> float:
    """Return the recorded or interpolated value at a point, whose first coordinate is T."""
    return table.value(dataset, seed, int(point[0]))
