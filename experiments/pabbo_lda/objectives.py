"""What a study minimises over the topics of one corpus, and what decides its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sklearn.model_selection import train_test_split

from experiments.pabbo_lda.inference import LdaFit
from experiments.pabbo_lda.optimizers import Point
from experiments.pabbo_lda.settings import DataSettings, LdaSettings, ObjectiveName
from experiments.pabbo_lda.tabular import TabularObjective
from raypipe.datasets import Corpus, load_corpus, make_corpus
from raypipe.errors import ConfigError
from raypipe.pipeline.identity import fingerprint

#: named in the identity of an evaluation; changed when its values change
NAMES: Mapping[ObjectiveName, str] = {
    "perplexity": "lda_perplexity, compiled",
    "heldout_perplexity": "lda_heldout_perplexity, compiled",
    "coherence": "lda_coherence, compiled",
    "tabular": "recorded",
}
#: CPU seconds that a pass over a count takes: so much, and so much a topic (measured on one core)
_PASS_S, _TOPIC_S = 1.3e-7, 2e-9
#: an evaluation of this length has a whole CPU; about a shorter one the driver and Ray do as much.
#: Smaller shares make more processes than cores, and each loads what it needs first (1.6 s).
_WHOLE_CPU_S = 0.02
_HELD_OUT = 0.2


@dataclass(frozen=True)
class Objective:
    """A function of (point, seed), the smaller the better.

    Attributes:
        dataset: what results call it.
        kind: its name in the configuration.
        identity: all that decides a value beside the point and the seed, as plain values.
        data_identity: the fingerprints of its data alone.
        data: the first argument of its function, shared by all tasks.
        arguments: what follows the point and the seed.
        counts: entries of the documents that an evaluation passes over, all passes together.

    """

    dataset: str
    kind: ObjectiveName
    identity: Mapping[str, Any]
    data_identity: Mapping[str, str]
    data: Any = field(repr=False)
    arguments: tuple[Any, ...] = ()
    counts: int = 0

    def function(self) -> Callable[..., float]:
        """``function(data, point, seed, *arguments)``, compiled when this is called."""
        if self.kind == "tabular":
            return tabular_value
        from experiments.pabbo_lda import topic_model

        functions = {
            "perplexity": topic_model.lda_perplexity,
            "heldout_perplexity": topic_model.lda_heldout_perplexity,
            "coherence": topic_model.lda_incoherence,
        }
        return functions[self.kind]

    def key(self, point: Point, seed: int) -> str:
        """The same for equal evaluations, in every study and every run directory."""
        return fingerprint({**self.identity, "seed": seed, **point.given})

    def cost_s(self, point: Point) -> float:
        """About the CPU seconds of an evaluation on one core; its order is what counts."""
        return self.counts * (_PASS_S + _TOPIC_S * point.T)

    def cpus(self, point: Point) -> float:
        """The share of a CPU by the cost: a whole one, or for a short evaluation less."""
        return min(1.0, max(0.25, round(4 * self.cost_s(point) / _WHOLE_CPU_S) / 4))


def load_objectives(data: DataSettings, lda: LdaSettings) -> list[Objective]:
    """The objective on each corpus of the settings.

    Raises:
        ConfigError: a corpus or a table that cannot be used, or a range of T beyond a corpus.

    """
    if lda.table is not None:
        return _tabular(lda.table, lda)
    return [_of_corpus(name, data, lda) for name in lda.datasets]


def tabular_value(table: TabularObjective, point: Point, seed: int, dataset: str) -> float:
    """The recorded, or interpolated, value."""
    T, *_ = point
    return table.value(dataset, seed, T)


def _of_corpus(name: str, data: DataSettings, lda: LdaSettings) -> Objective:
    corpora = {"corpus": load_corpus(data.source, name, data.dir, **data.options)}
    if lda.objective == "heldout_perplexity":
        corpora = _split(name, data, corpora["corpus"])
    words = min(corpus.words for corpus in corpora.values())
    if lda.t_max > words:
        raise ConfigError(
            f"lda.t_max = {lda.t_max}: the corpus {name} has only {words} words; "
            "T must lie in [2, words]"
        )
    how = LdaFit(lda.max_iter, lda.batch_size, lda.precision)
    contents = {role: corpus.fingerprint for role, corpus in corpora.items()}
    identity = {
        "objective": NAMES[lda.objective],
        **contents,
        **how._asdict(),
    }
    fitted, *held_out = (corpus.counts for corpus in corpora.values())
    return Objective(
        name,
        lda.objective,
        identity,
        {"fingerprint": contents.pop("corpus"), **contents},
        (fitted, *held_out) if held_out else fitted,
        (how,),
        fitted.nnz * lda.max_iter,
    )


def _split(name: str, data: DataSettings, corpus: Corpus) -> dict[str, Corpus]:
    """What is trained on and what is held out: the files' own parts, else a random fifth."""
    if data.source == "bow":
        options = {**data.options, "split": "train"}
        train = load_corpus(data.source, name, data.dir, **options)
        held_out = load_corpus(data.source, name, data.dir, **{**options, "split": "val"})
        if train.words != held_out.words:
            raise ConfigError(
                f"lda.objective = heldout_perplexity: the parts train and val of {name} have "
                f"{train.words} and {held_out.words} words; they must share a vocabulary"
            )
    else:
        parts = train_test_split(corpus.counts, test_size=_HELD_OUT, random_state=0)
        train, held_out = (make_corpus(name, part, source=name) for part in parts)
    return {"corpus": train, "held_out": held_out}


def _tabular(path: Path, lda: LdaSettings) -> list[Objective]:
    try:
        table = TabularObjective.read(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"lda.table = {path}: {error}") from error
    needed = {(name, lda.seed + run) for name in lda.datasets for run in range(lda.runs)}
    if missing := sorted(needed - {*table.runs}):
        known = ", ".join(sorted({dataset for dataset, _ in table.runs}))
        raise ConfigError(
            f"lda.table = {path}: holds no values of dataset and seed {missing[0]}; "
            f"its datasets are {known}"
        )
    objectives = []
    for name in lda.datasets:
        content = table.fingerprint(name)
        identity = {"objective": NAMES["tabular"], "corpus": content}
        objectives.append(
            Objective(name, "tabular", identity, {"fingerprint": content}, table, (name,))
        )
    return objectives
