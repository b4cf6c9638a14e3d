"""Configuration of the main job, section by section."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from experiments.common.corpora.load import Source
from experiments.pabbo_lda.objective import LdaPrecision, ObjectiveName
from experiments.pabbo_lda.optimizers import T_ONLY, OptimizerName
from experiments.pabbo_lda.optimizers.pabbo import PolicySettings
from experiments.pabbo_lda.pabbo.curve_training import CurvePolicySettings
from experiments.pabbo_lda.pabbo.evaluation import EvaluationSettings
from experiments.pabbo_lda.pabbo.model import LARGE
from experiments.pabbo_lda.pabbo.training import PabboSettings
from experiments.pabbo_lda.space import Space
from raypipe import Operational, Settings, TrainingSettings, TrainStageSettings

#: number of seeds of scikit-learn and Optuna
_SEEDS = 2**32

#: start of the published study: 20 values drawn with seed 42
START = (
    *(733, 811, 133, 355, 777, 115, 452, 940, 879, 345),
    *(576, 153, 950, 602, 162, 238, 422, 511, 660, 285),
)


log = logging.getLogger(__name__)


@cache
def _warn(text: str) -> None:
    """Say something once, though settings are read for every point of a matrix."""
    log.warning(text)


class CorporaSettings(Settings):
    """Corpora of the studies; their content is part of the identity of a study."""

    source: Source = "builtin"
    """Kind of corpus: `builtin`, or a file format."""
    dir: Operational[Path | None] = None
    """Folder that holds the files."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the source: `max_documents` (builtin), `split` (bow), `column` (tables),
    `max_features`, `min_df`, `max_df`, `stop_words` and `word_pattern` (texts).
    """

    @classmethod
    def settle(cls, name: str, values: Any, levels: Sequence[Any]) -> None:
        """Leave out the options that lower levels give to another source."""
        if not isinstance(values, dict) or not isinstance(values.get("options"), dict):
            return
        own: set[str] = set()
        for number, level in enumerate(levels):
            below = (each.get("source") for each in levels[number:])
            if next(filter(None, below), None) == values.get("source"):
                own.update(level.get("options") or ())
        others = [key for key in values["options"] if key not in own]
        values["options"] = {key: values["options"][key] for key in values["options"] if key in own}
        if others:
            listed = ", ".join(others)
            _warn(f"{name}.options: {listed}: left out, since {name}.source = {values['source']}")


def training_recipe(steps: int, effective_batch: int) -> TrainingSettings:
    """Return how PABBO is trained: fewer and larger steps than published (``docs/pabbo.md``)."""
    return TrainingSettings(
        steps=steps,
        effective_batch=effective_batch,
        optimizer="adam",
        learning_rate=3e-3,
        warmup_steps=20,
        clip_norm=1.0,
    )


class StepsStageSettings(TrainStageSettings):
    """A training whose length is given in steps, since its samples are drawn without end."""

    @model_validator(mode="after")
    def _has_steps(self) -> StepsStageSettings:
        if self.training.steps is None:
            raise ValueError("training.steps is missing; PABBO has no epochs")
        return self


class ModelStageSettings(StepsStageSettings):
    """A training, or the model that ships."""

    weights: Operational[Literal["trained", "shipped"]] = "trained"
    """Whether this run trains the model, or takes the one that ships with raypipe, whose weights
    are then part of the identity.
    """


class PabboStageSettings(ModelStageSettings):
    """Training of PABBO on synthetic functions."""

    training: TrainingSettings = training_recipe(steps=2000, effective_batch=16)
    """Length, optimizer, batch sizes and precision; `effective_batch` counts functions per step of
    the burn-in.
    """
    pabbo: PabboSettings = PabboSettings()
    """Model, training functions and losses of PABBO."""

    def fixed_by(self, length: int) -> str | None:
        """Return why a training of this length is not the beginning of a longer one; else None."""
        if 0 < self.pabbo.burn_in < 1:
            return f"pabbo.burn_in = {self.pabbo.burn_in} is a share of the length"
        return super().fixed_by(length)


class CurveStageSettings(ModelStageSettings):
    """Training of PABBO on perplexity curves, for the optimizer `pabbo_curves`."""

    training: TrainingSettings = training_recipe(steps=2400, effective_batch=48)
    """Length, optimizer, batch sizes and precision; `effective_batch` counts curves per step."""
    pabbo: CurvePolicySettings = CurvePolicySettings()
    """Model, training curves and loss."""


class LdaSettings(Settings):
    """Studies: every optimizer on every corpus, several runs each."""

    datasets: Operational[tuple[str, ...]] = Field(("stdlib",), min_length=1)
    """Names of the corpora."""
    optimizers: Operational[tuple[OptimizerName, ...]] = Field(
        (
            *("ga", "es", "pabbo_small", "pabbo_large", "sabbo"),
            *("random", "tpe", "golden_section", "bisect", "gp_ei"),
        ),
        min_length=1,
    )
    """Optimizers to compare."""
    runs: Operational[PositiveInt] = 10
    """Studies per optimizer and corpus; their seeds are consecutive."""
    seed: int = Field(42, ge=0)
    """Seed of run 0; run r has the seed `seed + r`."""
    seeds: Operational[PositiveInt] = 1
    """LDA seeds per value of T, whose mean is the value; the published study has 1."""
    final_seeds: Operational[int] = Field(3, ge=0)
    """Further LDA seeds with which the best T of each study is fitted, for a comparison on seeds
    that no search saw; not for recorded values.
    """
    t_min: int = Field(2, ge=2)
    """Smallest number of topics T."""
    t_max: int = Field(1000, ge=2)
    """Largest number of topics T; at most the words of a corpus."""
    alpha: tuple[float, float] | None = None
    """Range of the document-topic prior, searched in addition to T; 1/T if not given."""
    eta: tuple[float, float] | None = None
    """Range of the topic-word prior, searched in addition to T; 1/T if not given."""
    start: tuple[int, ...] = Field(START, min_length=1)
    """Values of T from which every optimizer starts."""
    evaluations: Operational[PositiveInt] = 80
    """Budget of a study: distinct values of T, including the start."""
    iterations: PositiveInt | None = None
    """Maximum number of batches after the start; no limit if not given."""
    max_iter: PositiveInt = 60
    """Passes of LDA over the corpus."""
    batch_size: PositiveInt = 2048
    """Documents per update of LDA."""
    precision: LdaPrecision = "float64"
    """Type of the word probabilities in LDA; float32 is faster and exact to 1e-3."""
    objective: ObjectiveName = "perplexity"
    """Value to minimize: the perplexity of the fitted documents, the perplexity of held-out
    documents, the negative NPMI coherence of the topics, or recorded values.
    """
    table: Operational[Path | None] = None
    """Recorded values for `objective: tabular`: a CSV file with the columns dataset, seed, T and
    perplexity.
    """
    cpus: Operational[PositiveFloat | None] = None
    """CPUs per evaluation; a whole one, or less for short evaluations, if not given."""
    time_limit_s: Operational[PositiveFloat | None] = None
    """Time limit per attempt at an evaluation, in seconds; none by default."""
    attempts: Operational[PositiveInt] = 3
    """Attempts at an evaluation whose process dies or exceeds the time limit."""
    cache: Operational[bool] = True
    """Whether to share values with other runs through the user's cache."""
    policy: Operational[PolicySettings] = PolicySettings()
    """Use of the model by `pabbo_small` and `pabbo_large`."""

    @property
    def unseen_seeds(self) -> int:
        """Seeds of the final comparison; recorded values have none."""
        return self.final_seeds if self.table is None else 0

    @property
    def space(self) -> Space:
        """The search space of the optimizers."""
        return Space(self.t_min, self.t_max, self.alpha, self.eta)

    @model_validator(mode="after")
    def _consistent(self) -> LdaSettings:
        if self.seed + self.runs > _SEEDS:
            raise ValueError(
                f"seed = {self.seed} with runs = {self.runs}: seeds end at 2**32 - 1; "
                f"seed + runs must be at most {_SEEDS}"
            )
        if self.t_min >= self.t_max:
            raise ValueError(f"t_min = {self.t_min} is not below t_max = {self.t_max}")
        outside = [T for T in self.start if not self.t_min <= T <= self.t_max]
        if outside:
            raise ValueError(
                f"start = {outside}: outside [t_min, t_max] = [{self.t_min}, {self.t_max}]"
            )
        for name, ends in (("alpha", self.alpha), ("eta", self.eta)):
            if ends is None:
                continue
            if not 1e-3 <= ends[0] < ends[1] <= 1:
                raise ValueError(f"lda.{name} = {list(ends)}: must be 1e-3 <= low < high <= 1")
            if alone := [optimizer for optimizer in self.optimizers if optimizer in T_ONLY]:
                raise ValueError(
                    f"lda.optimizers = {alone}: these search T alone; "
                    f"leave them out, or leave lda.{name} out"
                )
            if self.table is not None:
                raise ValueError(f"table: its values have the priors 1/T; leave lda.{name} out")
        for name, values in (("datasets", self.datasets), ("optimizers", self.optimizers)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}: a name is given twice")
        if (self.objective == "tabular") != (self.table is not None):
            raise ValueError(
                f"objective = {self.objective} with table = {self.table}: recorded values need "
                "objective=tabular and the file; leave table out with other objectives"
            )
        if self.table is not None and self.seeds > 1:
            raise ValueError(
                f"seeds = {self.seeds} with recorded values, which have one seed per run; "
                "leave lda.seeds out"
            )
        if self.cpus is not None and self.cpus > 1 and self.cpus != int(self.cpus):
            raise ValueError(f"cpus = {self.cpus}: above 1 it must be a whole number")
        return self


class MainSettings(Settings):
    """The main job."""

    data: CorporaSettings = CorporaSettings()
    """Corpora of the studies."""
    train_small: PabboStageSettings = PabboStageSettings()
    """Training of the small PABBO model."""
    evaluate_small: EvaluationSettings = EvaluationSettings()
    """Evaluation of the small model on held-out functions."""
    train_large: PabboStageSettings = PabboStageSettings(
        training=training_recipe(steps=8000, effective_batch=32),
        pabbo=PabboSettings(model=LARGE),
    )
    """Training of the large PABBO model."""
    evaluate_large: EvaluationSettings = EvaluationSettings()
    """Evaluation of the large model on held-out functions."""
    train_curves: CurveStageSettings = CurveStageSettings()
    """Training of the model of `pabbo_curves`, if the studies use it."""
    lda: LdaSettings = LdaSettings()
    """Studies of the optimizers: corpora, search space and budget."""
