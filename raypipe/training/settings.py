"""Settings of a training run, with the same names in every experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from raypipe.config.settings import Level, Operational, Settings
from raypipe.config.validation import dig
from raypipe.hardware import Precision
from raypipe.training import batching


class MonitorSettings(Settings):
    """Selection of the best model by an evaluation metric, and early stopping."""

    metric: str = Field("loss", description="Metric of the evaluation, without its prefix `eval_`.")
    mode: Literal["min", "max"] = Field(
        "min", description="Whether the metric is minimized or maximized."
    )
    patience: PositiveInt | None = Field(
        None,
        description="Evaluations without improvement after which the training stops; never if not "
        "given.",
    )
    min_delta: float = Field(
        0.0, ge=0, description="Smallest change of the metric that counts as an improvement."
    )


class TrainingSettings(Settings):
    """Length, optimizer, batch sizes and arithmetic of a training run.

    ``effective_batch = micro_batch x accumulation x workers``; the configuration gives any two.
    """

    micro_batch: Operational[PositiveInt | None] = Field(
        None, description="Samples per worker per forward pass."
    )
    accumulation: Operational[PositiveInt | None] = Field(
        None, description="Forward passes per worker per optimizer step (accumulation steps)."
    )
    effective_batch: PositiveInt | None = Field(
        None, description="Samples per optimizer step, summed over all workers."
    )
    precision: Precision = Field(
        "fp32",
        description="Arithmetic of the forward and backward pass. tf32 and bf16 need a GPU with "
        "compute capability 8 or higher.",
    )
    steps: PositiveInt | None = Field(
        None, description="Length of the training in optimizer steps; alternative to `epochs`."
    )
    epochs: PositiveInt | None = Field(
        None, description="Length of the training in passes over the data; alternative to `steps`."
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="Seed of the initial weights, the data order and every random draw.",
    )
    compile: Operational[bool] = Field(
        False, description="Whether to compile the model and the loss with torch.compile."
    )
    gradient_checkpointing: Operational[bool] = Field(
        False,
        description="Whether to recompute activations in the backward pass, which saves memory.",
    )
    clip_norm: PositiveFloat | None = Field(
        None, description="Maximum norm of the gradient; no clipping if not given."
    )
    learning_rate: PositiveFloat = Field(1e-3, description="Peak learning rate, after warm-up.")
    optimizer: Literal["adam", "adamw", "adafactor"] = Field(
        "adamw",
        description="Optimizer. adafactor stores n + m values for an n x m weight where Adam "
        "stores 2 n m; its learning_rate is relative to the size of each weight.",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Decay rates of Adam's first and second moment estimates."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay: L2 penalty with adam, decoupled with adamw."
    )
    warmup_steps: int | Annotated[float, Field(gt=0, lt=1)] = Field(
        0,
        ge=0,
        description="Linear warm-up from zero, in optimizer steps; below 1, a fraction of all "
        "steps.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="Learning-rate schedule after warm-up."
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Final learning rate of the linear and cosine schedules, as a fraction of the "
        "peak.",
    )
    log_every: Operational[PositiveInt] = Field(
        10, description="Optimizer steps between rows of the table `steps`."
    )
    eval_every: Operational[PositiveInt | None] = Field(
        None,
        description="Optimizer steps between evaluations on held-out data; only at the end if not "
        "given.",
    )
    eval_batch: Operational[PositiveInt | None] = Field(
        None,
        description="Samples per worker per forward pass of an evaluation; `micro_batch` if not "
        "given.",
    )
    monitor: MonitorSettings | None = Field(
        None, description="Metric that selects the best model and may stop the training early."
    )
    checkpoint_every: Operational[PositiveInt | None] = Field(
        None,
        description="Optimizer steps between checkpoints; if not given, a tenth of the training, "
        "and at least 10 s.",
    )
    keep_checkpoints: Operational[PositiveInt] = Field(
        2, description="Number of most recent checkpoints that are kept."
    )

    def identity(self) -> dict[str, Any]:
        """Return the values that decide the result.

        With a monitor, ``eval_every`` does: it decides which steps can be the best one.
        """
        identity = super().identity()
        if self.monitor is not None:
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
    """Distribution of a training run over workers; it cannot change the result."""

    workers: Operational[PositiveInt | tuple[PositiveInt, PositiveInt] | Literal["auto"]] = Field(
        "auto",
        description="Worker processes of the run; [min, max] uses as many as the cluster has room "
        "for. auto is one on CPUs and all that fit on the stage's share of the GPUs; the batch "
        "sizes are those of one worker, and the effective batch is kept.",
    )
    gpus_per_worker: Operational[float | None] = Field(
        None,
        ge=0,
        description="GPUs per worker; 1 on a cluster with GPUs and 0 on CPUs if not given. A "
        "fraction shares a GPU.",
    )
    cpus_per_worker: Operational[PositiveFloat | Literal["auto"]] = Field(
        "auto",
        description="CPU cores that each worker reserves and uses; auto reserves one and also uses "
        "an equal part of those that are idle on its node.",
    )
    strategy: Operational[Literal["ddp", "fsdp"]] = Field(
        "ddp", description="Data parallelism with replicated (ddp) or sharded (fsdp) weights."
    )

    @property
    def most_workers(self) -> int:
        """The number of workers, the largest one where it is elastic; 1 for ``auto``."""
        return self._range[1]

    @property
    def reserved_cpus(self) -> float:
        """The CPU cores that each worker reserves."""
        return 1.0 if self.cpus_per_worker == "auto" else self.cpus_per_worker

    @property
    def threads(self) -> int | None:
        """The number of threads of each worker; None if the idle cores decide."""
        return None if self.cpus_per_worker == "auto" else max(1, int(self.cpus_per_worker))

    @property
    def fewest_workers(self) -> int:
        """The number of workers, the smallest one where it is elastic; 1 for ``auto``."""
        return self._range[0]

    @property
    def _range(self) -> tuple[int, int]:
        if self.workers == "auto":
            return 1, 1
        return (self.workers, self.workers) if isinstance(self.workers, int) else self.workers

    @field_validator("workers", mode="before")
    @classmethod
    def _number_or_range(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) != 2:
            raise ValueError("must be a number of workers, [min, max] or auto")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> ScalingSettings:
        if self.fewest_workers > self.most_workers:
            raise ValueError(f"workers = {list(self.workers)}: the first is above the second")  # type: ignore[arg-type]
        return self


class LoaderSettings(Settings):
    """Data loading; it cannot change the result."""

    workers: Operational[Annotated[int, Field(ge=0)] | Literal["auto"] | None] = Field(
        None,
        description="Loader processes per worker; 0 loads in the worker itself. By default it "
        "follows from the node's cores; `auto` measures some before the run and reports the "
        "bottleneck.",
    )
    prefetch: Operational[PositiveInt] = Field(
        2, description="Batches that each loader process keeps ready."
    )
    pin_memory: Operational[bool | None] = Field(
        None, description="Whether batches are in page-locked memory; by default on a GPU."
    )

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return the section for ``loader: auto``."""
        return {"workers": "auto"} if given == "auto" else given


OomStep = Literal["gradient_checkpointing", "fsdp", "shorten", "bf16"]


class TrainStageSettings(Settings):
    """A training stage: ``<stage>.training``, ``<stage>.scaling``, ``<stage>.loader``."""

    training: TrainingSettings = Field(
        TrainingSettings(), description="Length, optimizer, batch sizes and precision."
    )
    scaling: ScalingSettings = Field(
        ScalingSettings(), description="Workers and the resources that each one holds."
    )
    loader: LoaderSettings = Field(
        LoaderSettings(), description="Loader processes and prefetching of batches."
    )
    max_restarts: Operational[int] = Field(
        3, ge=0, description="Restarts from the last checkpoint after a worker failure."
    )
    on_oom: Operational[tuple[OomStep, ...]] = Field(
        (),
        description="Changes to try, in this order, when micro-batch 1 runs out of memory.",
    )
    memory_trial: Operational[int] = Field(
        0,
        ge=0,
        description="Optimizer steps on the longest samples before a new run, to find a "
        "micro-batch that fits.",
    )
    from_sweep: bool = Field(
        False, description="Whether to train with the settings that the sweep recommends."
    )

    #: precisions that this training rejects, each with the reason
    unusable: ClassVar[Mapping[Precision, str]] = {}

    @classmethod
    def settle(cls, name: str, values: Any, levels: Sequence[Level]) -> None:
        """Settle the length and the batch sizes: the higher level wins.

        Raises:
            BatchConflict: the sizes of one level contradict each other.

        """
        _settle_length(values, levels)
        _settle_batch_sizes(name, values, levels)

    def with_gpus(self, gpus: int) -> TrainStageSettings:
        """Return the settings with ``gpus_per_worker`` resolved for a cluster with ``gpus`` GPUs.

        It is resolved once: a run that loses its GPUs must not silently continue on the CPU.
        """
        if self.scaling.gpus_per_worker is not None:
            return self
        scaling = self.scaling.model_copy(update={"gpus_per_worker": 1.0 if gpus else 0.0})
        return self.model_copy(update={"scaling": scaling})

    def with_workers(self, workers: int) -> TrainStageSettings:
        """Return the settings with this number of workers."""
        scaling = self.scaling.model_copy(update={"workers": workers})
        return self.model_copy(update={"scaling": scaling})

    def with_loader_workers(self, processes: int) -> TrainStageSettings:
        """Return the settings with this number of loader processes per worker."""
        loader = self.loader.model_copy(update={"workers": processes})
        return self.model_copy(update={"loader": loader})


def _settle_length(values: Any, levels: Sequence[Level]) -> None:
    """Of steps and epochs, keep the one that the higher level gives."""
    for level in levels:
        training = dig(level.values, "training")
        given = [key for key in ("steps", "epochs") if dig(training, key) is not None]
        if len(given) == 1:
            other = "epochs" if given == ["steps"] else "steps"
            values["training"][other] = None
        if given:
            return


def _settle_batch_sizes(name: str, values: Any, levels: Sequence[Level]) -> None:
    """Settle micro_batch, accumulation and effective_batch."""
    if not isinstance(values, dict) or not isinstance(values.get("training"), dict):
        return  # a wrong type, which validation reports
    try:
        sizes = [_sizes(dig(level.values, "training")) for level in levels]
        scaling = ScalingSettings(workers=dig(values, "scaling", "workers"))
    except ValidationError:
        return  # reported by validation as well
    giver = next(i for i, level in enumerate(levels) if dig(level.values, "scaling", "workers"))
    try:
        plan = batching.resolve(sizes, scaling.most_workers, giver)
    except batching.BatchConflict as error:
        origin = levels[error.level].origin
        raise batching.BatchConflict(error.level, f"{origin}: {name}.training: {error}") from error
    values["training"] |= {key: getattr(plan, key) for key in batching.KEYS}


def _sizes(training: Any) -> dict[str, int]:
    """Return a level's batch sizes as numbers (``1e2``, ``"16"``). Raises ValidationError."""
    given = {key: dig(training, key) for key in batching.KEYS}
    read = TrainingSettings.model_validate(given)
    return {key: getattr(read, key) for key in batching.KEYS if given[key] is not None}
