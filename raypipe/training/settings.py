"""The settings of a training run: the same names in every experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from raypipe.config.settings import Settings
from raypipe.hardware import Precision

_WITHOUT_EFFECT = {
    "micro_batch",
    "accumulation",
    "compile",
    "gradient_checkpointing",
    "log_every",
    "eval_every",
    "eval_batch",
    "checkpoint_every",
    "keep_checkpoints",
}


class MonitorSettings(Settings):
    """Which measure says how good a model is: the best one is kept, and when to stop."""

    metric: str = Field("loss", description="a measure of the evaluation, without its eval_")
    mode: Literal["min", "max"] = Field("min", description="whether less or more is better")
    patience: PositiveInt | None = Field(
        None, description="stop after so many evaluations without a better one; or never"
    )
    min_delta: float = Field(0.0, ge=0, description="a smaller change is not better")


class TrainingSettings(Settings):
    """What decides the result of a training run.

    ``effective_batch = micro_batch x accumulation x workers``; the configuration gives any two.
    """

    micro_batch: PositiveInt | None = Field(None, description="samples a worker a forward")
    accumulation: PositiveInt | None = Field(None, description="forwards a worker a step")
    effective_batch: PositiveInt | None = Field(None, description="samples a step, all workers")
    precision: Precision = Field("fp32", description="arithmetic of the forward and backward")
    steps: PositiveInt | None = Field(None, description="optimiser steps; or give epochs")
    epochs: PositiveInt | None = Field(None, description="passes over the data; or give steps")
    seed: int = Field(
        0, ge=0, lt=2**32, description="seed of the weights, the data order and every draw"
    )
    compile: bool = Field(False, description="torch.compile the model and the loss")
    gradient_checkpointing: bool = Field(False, description="recompute activations backward")
    clip_norm: PositiveFloat | None = Field(None, description="largest norm of the gradient")
    learning_rate: PositiveFloat = Field(1e-3, description="the peak learning rate")
    optimizer: Literal["adam", "adamw", "adafactor"] = Field(
        "adamw",
        description="adafactor holds n + m values of an n x m matrix where Adam holds 2 n m; its "
        "learning_rate is a share of each weight's own size",
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's moment decay rates")
    weight_decay: float = Field(0.0, ge=0, description="L2 in adam, else decoupled")
    warmup_steps: int | Annotated[float, Field(gt=0, lt=1)] = Field(
        0, ge=0, description="linear warm-up from zero, in steps; below 1 a share of all steps"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="after it")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="where linear and cosine end, as a share of the peak rate"
    )
    log_every: PositiveInt = Field(10, description="a row in `steps` every so many steps")
    eval_every: PositiveInt | None = Field(None, description="evaluate every so many steps")
    eval_batch: PositiveInt | None = Field(
        None, description="samples a worker an evaluation forward; micro_batch if not given"
    )
    monitor: MonitorSettings | None = Field(
        None, description="keep the best model by an evaluation's measure, and stop early"
    )
    checkpoint_every: PositiveInt | None = Field(None, description="save every so many steps")
    keep_checkpoints: PositiveInt = Field(2, description="how many of the newest are kept")

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result.

        The cut of a step into micro-batches does not, nor does what is logged and saved.
        """
        identity = self.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
        if self.monitor is not None:  # which steps are evaluated decides which is the best
            identity["eval_every"] = self.eval_every
        return identity

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSettings:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either steps or epochs, not both")
        if self.monitor is not None and self.eval_every is None:
            raise ValueError("monitor needs eval_every: how often the measure is taken")
        return self


class ScalingSettings(Settings):
    """How a training run is spread; it cannot change the result."""

    workers: PositiveInt | tuple[PositiveInt, PositiveInt] = Field(
        1, description="worker processes of the run; [min, max]: as many as there is room for"
    )
    gpus_per_worker: float | None = Field(None, ge=0, description="1 where there is a GPU, else 0")
    cpus_per_worker: PositiveFloat = Field(1, description="cores a worker reserves and uses")
    strategy: Literal["ddp", "fsdp"] = Field("ddp", description="replicate or shard the model")

    @property
    def most_workers(self) -> int:
        """The number of workers, the largest one where it is elastic."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def fewest_workers(self) -> int:
        """The number of workers, the smallest one where it is elastic."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @field_validator("workers", mode="before")
    @classmethod
    def _number_or_range(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) != 2:
            raise ValueError("must be a number of workers, or [min, max]")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> ScalingSettings:
        if self.fewest_workers > self.most_workers:
            raise ValueError(f"workers = {list(self.workers)}: the first is above the second")  # type: ignore[arg-type]
        return self


class LoaderSettings(Settings):
    """How batches reach the device; it cannot change the result."""

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        None,
        description="loader processes a worker; 0 loads in line; by default from the node's "
        "cores; auto tries some before the run and says what bounds the speed",
    )
    prefetch: PositiveInt = Field(2, description="batches a loader process keeps ready")
    pin_memory: bool | None = Field(None, description="page-locked batches; yes on a GPU")

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """``loader: auto``."""
        return {"workers": "auto"} if given == "auto" else given


OomStep = Literal["gradient_checkpointing", "fsdp", "shorten", "bf16"]


class TrainStageSettings(Settings):
    """A training stage: ``<stage>.training``, ``<stage>.scaling``, ``<stage>.loader``."""

    training: TrainingSettings = TrainingSettings()
    scaling: ScalingSettings = ScalingSettings()
    loader: LoaderSettings = LoaderSettings()
    max_restarts: int = Field(3, ge=0, description="restarts after a worker died")
    on_oom: tuple[OomStep, ...] = Field(
        (), description="what to try, in this order, when micro-batch 1 does not fit"
    )
    memory_trial: int = Field(
        0, ge=0, description="steps on the longest samples before the run, to see that it fits"
    )
    from_sweep: bool = Field(False, description="take the settings that the sweep recommends")

    #: precisions that this training must not be given, and why
    unusable: ClassVar[Mapping[Precision, str]] = {}

    def with_gpus(self, gpus: int) -> TrainStageSettings:
        """The same with the GPUs of a worker decided, for a cluster that has so many.

        It is decided once: a run that loses its GPUs must not go on on the CPU unnoticed.
        """
        if self.scaling.gpus_per_worker is not None:
            return self
        scaling = self.scaling.model_copy(update={"gpus_per_worker": 1.0 if gpus else 0.0})
        return self.model_copy(update={"scaling": scaling})

    def with_loader_workers(self, processes: int) -> TrainStageSettings:
        """The same with so many loader processes a worker."""
        loader = self.loader.model_copy(update={"workers": processes})
        return self.model_copy(update={"loader": loader})
