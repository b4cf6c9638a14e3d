"""Objective of a study: a function of the topics and priors of one corpus, and its identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sklearn.model_selection import train_test_split

from experiments.common.corpora.corpus import Corpus, CorpusError, make_corpus
from experiments.common.corpora.load import load_corpus
from experiments.pabbo_lda.objective.fit_options import LdaFit
from experiments.pabbo_lda.objective.tabular import TabularObjective, tabular_value
from experiments.pabbo_lda.optimizers import Point
from raypipe.errors import ConfigError
from raypipe.graph.identity import fingerprint

if TYPE_CHECKING:  # torch comes with the settings of PABBO
    from experiments.pabbo_lda.settings import CorporaSettings, LdaSettings, ObjectiveName

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
        corpus: a row of the table ``corpora``; None where values are recorded.
        letters: share of the letters of the documents that belong to no word.

    """

    dataset: str
    kind: ObjectiveName
    data_fingerprints: Mapping[str, str]
    data: Any = field(repr=False)
    fit: LdaFit | None = None
    counts: int = 0
    corpus: Mapping[str, Any] | None = None
    letters: float = 0.0

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

    def notes(self) -> list[str]:
        """Return the size of the corpus in words, and what of it the studies do not see."""
        if (corpus := self.corpus) is None:
            return []
        size = ", ".join(f"{name} {corpus[name]}" for name in ("documents", "words", "tokens"))
        notes = [f"corpus {self.dataset}: {size}"]
        if dropped := corpus["dropped_documents"]:
            notes.append(
                f"WARNING: corpus {self.dataset}: {dropped} of {corpus['documents'] + dropped} "
                "documents have no word of the vocabulary and are left out"
            )
        if empty := corpus["empty_documents"]:
            notes.append(
                f"WARNING: corpus {self.dataset}: {empty} of {corpus['documents']} documents have "
                "no word; they are kept"
            )
        if self.letters > _MANY_SKIPPED:
            notes.append(
                f"WARNING: corpus {self.dataset}: {self.letters:.0%} of the letters are in no "
                f"word: {_TOKENS}"
            )
        return notes

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
        hint = f"; {_TOKENS}" if data.source not in ("bow", "uci") else ""
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
        {
            "dataset": name,
            "documents": corpus.documents,
            "dropped_documents": corpus.dropped_documents,
            "empty_documents": corpus.empty_documents,
            "words": corpus.words,
            "tokens": corpus.tokens,
        },
        corpus.skipped_letters,
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
