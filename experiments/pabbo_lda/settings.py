"""The configuration of the main job, section by section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from experiments.pabbo_lda.curve_training import CurvePolicySettings
from experiments.pabbo_lda.evaluation import EvaluationSettings
from experiments.pabbo_lda.model import LARGE
from experiments.pabbo_lda.optimizers import OptimizerName, PolicySettings
from experiments.pabbo_lda.recipe import PabboSettings
from raypipe.datasets import Source
from raypipe.settings import Settings
from raypipe.training.settings import TrainingSettings, TrainStageSettings

LdaPrecision = Literal["float64", "float32"]

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

    training: TrainingSettings = recipe(steps=1200, effective_batch=16)
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
    start: tuple[int, ...] = Field(START, min_length=1, description="T told to every optimiser")
    evaluations: PositiveInt = Field(80, description="distinct T a study, the start included")
    iterations: PositiveInt | None = Field(None, description="most batches after the start")
    max_iter: PositiveInt = Field(60, description="passes of LDA over the corpus")
    batch_size: PositiveInt = Field(2048, description="documents a step of LDA")
    precision: LdaPrecision = Field(
        "float64", description="of the words' probabilities; float32 is faster, to 1e-3"
    )
    cpus: Annotated[float, Field(gt=0)] = Field(0.5, description="share of a CPU an evaluation")
    policy: PolicySettings = Field(PolicySettings(), description="how PABBO's model is used")

    @model_validator(mode="after")
    def _consistent(self) -> LdaSettings:
        if self.t_min >= self.t_max:
            raise ValueError(f"t_min = {self.t_min} is not below t_max = {self.t_max}")
        outside = [T for T in self.start if not self.t_min <= T <= self.t_max]
        if outside:
            raise ValueError(
                f"start = {outside}: outside [t_min, t_max] = [{self.t_min}, {self.t_max}]"
            )
        for name, values in (("datasets", self.datasets), ("optimizers", self.optimizers)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}: a name is given twice")
        if self.cpus > 1 and self.cpus != int(self.cpus):
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
