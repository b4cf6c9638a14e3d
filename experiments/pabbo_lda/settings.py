"""The configuration of the main job, section by section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from experiments.pabbo_lda.curve_training import CurvePolicySettings
from experiments.pabbo_lda.evaluation import EvaluationSettings
from experiments.pabbo_lda.inference import LdaPrecision
from experiments.pabbo_lda.model import LARGE
from experiments.pabbo_lda.optimizers import T_ONLY, OptimizerName, PolicySettings, Space
from experiments.pabbo_lda.recipe import PabboSettings
from raypipe.config.settings import Settings
from raypipe.datasets import Source
from raypipe.training.settings import TrainingSettings, TrainStageSettings

ObjectiveName = Literal["perplexity", "heldout_perplexity", "coherence", "tabular"]

#: so many seeds have scikit-learn and Optuna
_SEEDS = 2**32

#: the published study's start: 20 values drawn with seed 42
START = (
    *(733, 811, 133, 355, 777, 115, 452, 940, 879, 345),
    *(576, 153, 950, 602, 162, 238, 422, 511, 660, 285),
)


class DataSettings(Settings):
    """Where the corpora come from."""

    source: Source = Field("builtin", description="the built-in corpus, or a kind of file")
    dir: Path | None = Field(None, description="the folder of the files")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="of the source: max_documents (builtin), split (bow), column (tables), "
        "max_features, min_df, max_df (texts)",
    )


def recipe(steps: int, effective_batch: int) -> TrainingSettings:
    """How PABBO is trained, see ``docs/pabbo.md``: fewer, larger steps than published."""
    return TrainingSettings(
        steps=steps,
        effective_batch=effective_batch,
        optimizer="adam",
        learning_rate=3e-3,
        warmup_steps=20,
        clip_norm=1.0,
    )


class PabboStageSettings(TrainStageSettings):
    """The training of an optimiser model."""

    training: TrainingSettings = recipe(steps=2000, effective_batch=16)
    pabbo: PabboSettings = PabboSettings()


class CurveStageSettings(TrainStageSettings):
    """The training of our own optimiser model, which knows what perplexities look like."""

    training: TrainingSettings = recipe(steps=1200, effective_batch=48)
    pabbo: CurvePolicySettings = CurvePolicySettings()


class LdaSettings(Settings):
    """The studies: which optimiser finds the best number of topics."""

    datasets: tuple[str, ...] = Field(("stdlib",), min_length=1, description="corpora by name")
    optimizers: tuple[OptimizerName, ...] = Field(
        ("ga", "es", "pabbo_small", "pabbo_large", "sabbo", "random", "tpe", "golden_section"),
        min_length=1,
        description="what is compared",
    )
    runs: PositiveInt = Field(10, description="studies an optimiser and corpus; seeds follow on")
    seed: int = Field(42, ge=0, description="run r has the seed `seed + r`")
    t_min: int = Field(2, ge=2, description="fewest topics")
    t_max: int = Field(1000, ge=2, description="most topics; at most the words of a corpus")
    alpha: tuple[float, float] | None = Field(
        None, description="range of the document-topic prior, searched beside T; None: 1/T"
    )
    eta: tuple[float, float] | None = Field(
        None, description="range of the topic-word prior, searched beside T; None: 1/T"
    )
    start: tuple[int, ...] = Field(START, min_length=1, description="T told to every optimiser")
    evaluations: PositiveInt = Field(80, description="distinct T a study, the start included")
    iterations: PositiveInt | None = Field(None, description="most batches after the start")
    max_iter: PositiveInt = Field(60, description="passes of LDA over the corpus")
    batch_size: PositiveInt = Field(2048, description="documents a step of LDA")
    precision: LdaPrecision = Field(
        "float64", description="of the words' probabilities; float32 is faster, to 1e-3"
    )
    objective: ObjectiveName = Field(
        "perplexity",
        description="what is minimised: the perplexity of the documents fitted to, or of documents "
        "held out, the negative NPMI coherence of the topics, or recorded values",
    )
    table: Path | None = Field(
        None, description="of objective=tabular: a CSV file of dataset, seed, T, perplexity"
    )
    cpus: PositiveFloat | None = Field(
        None, description="share of a CPU an evaluation; by default a whole one, or less if short"
    )
    time_limit_s: PositiveFloat | None = Field(None, description="of an attempt at an evaluation")
    attempts: PositiveInt = Field(3, description="at an evaluation that dies or takes too long")
    cache: bool = Field(True, description="take and keep values in the user's cache, across runs")
    policy: PolicySettings = Field(PolicySettings(), description="how PABBO's model is used")

    @property
    def space(self) -> Space:
        """What the optimisers search."""
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
                    f"leave them out, or leave lda.{name} away"
                )
        for name, values in (("datasets", self.datasets), ("optimizers", self.optimizers)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}: a name is given twice")
        if self.table is not None and (self.alpha is not None or self.eta is not None):
            raise ValueError("table: its values are of priors 1/T; leave alpha and eta out")
        if (self.objective == "tabular") != (self.table is not None):
            raise ValueError(
                f"objective = {self.objective} with table = {self.table}: recorded values need "
                "objective=tabular and the file; leave table out with other objectives"
            )
        if self.cpus is not None and self.cpus > 1 and self.cpus != int(self.cpus):
            raise ValueError(f"cpus = {self.cpus}: above 1 it must be a whole number")
        return self


class MainSettings(Settings):
    """The whole main job."""

    data: DataSettings = DataSettings()
    train_small: PabboStageSettings = PabboStageSettings()
    evaluate_small: EvaluationSettings = EvaluationSettings()
    train_large: PabboStageSettings = PabboStageSettings(
        training=recipe(steps=8000, effective_batch=32),
        pabbo=PabboSettings(model=LARGE),
    )
    evaluate_large: EvaluationSettings = EvaluationSettings()
    train_curves: CurveStageSettings = CurveStageSettings()
    lda: LdaSettings = LdaSettings()
