"""Settings of a training run, with the same names in every experiment, and what they require.

Requirements: what the hardware must have, and how much of a cluster a training uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from raypipe import hardware
from raypipe.config.settings import Level, Operational, Settings
from raypipe.config.validation import dig
from raypipe.hardware import Hardware, Precision
from raypipe.training import batching

#: a number of optimizer steps, or a fraction of all of them
Share = Annotated[float, Field(gt=0, lt=1)]
#: the settings that say how long a training is
LENGTH_KEYS = ("steps", "epochs")


class MonitorSettings(Settings):
    """Selection of the best model by an evaluation metric, and early stopping."""

    metric: str | None = None
    """Metric of the evaluation, without its prefix `eval_`; by default the first one that the
    experiment declares (`Experiment.step_metrics`), else the loss.
    """
    mode: Literal["min", "max"] | None = None
    """Whether the metric is minimized or maximized; by default what is declared or its name tells,
    else min.
    """
    patience: PositiveInt | Share | None = 0.4
    """Evaluations without improvement after which the training stops; below 1, a fraction of all
    steps; null never stops.
    """


class TrainingSettings(Settings):
    """Length, optimizer, batch sizes and arithmetic of a training run.

    ``effective_batch = micro_batch x accumulation x workers``; the configuration gives any two.
    """

    clip_norm: PositiveFloat | None = None
    """Maximum norm of the gradient; no clipping if not given."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate, after warm-up."""
    optimizer: Literal["adam", "adamw", "adafactor", "muon"] = "adamw"
    """Optimizer. adafactor stores n + m values for an n x m weight where Adam stores 2 n m; its
    learning_rate is relative to the size of each weight. muon updates the matrices of the task's
    blocks, and adamw all other weights, with the same learning_rate.
    """
    weights: Literal["fp32", "bf16"] = "fp32"
    """Precision in which weights and gradients are stored. bf16 halves their memory; it needs
    `optimizer: adafactor`, which then rounds new weights at random, and `precision: bf16`.
    """
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment estimates."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: L2 penalty with adam, decoupled with the others."""
    warmup_steps: int | Share = Field(0, ge=0)
    """Linear warm-up from zero, in optimizer steps; below 1, a fraction of all steps."""
    schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = "cosine"
    """Learning-rate schedule after warm-up. warmup-stable-decay is constant until the last
    `decay_steps`.
    """
    decay_steps: PositiveInt | Share = 0.2
    """Length of the decay of warmup-stable-decay, in optimizer steps; below 1, a fraction of all
    steps.
    """
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of a schedule that decays, as a fraction of the peak."""
    micro_batch: Operational[PositiveInt | None] = None
    """Samples per worker per forward pass."""
    accumulation: Operational[PositiveInt | None] = None
    """Forward passes per worker per optimizer step (accumulation steps)."""
    effective_batch: PositiveInt | None = None
    """Samples per optimizer step, summed over all workers; 32 if neither this nor `micro_batch` is
    given.
    """
    precision: Precision = "fp32"
    """Arithmetic of the forward and backward pass. tf32 and bf16 need a GPU with compute capability
    8 or higher.
    """
    steps: PositiveInt | None = None
    """Length of the training in optimizer steps; alternative to `epochs`."""
    epochs: PositiveInt | None = None
    """Length of the training in passes over the data; alternative to `steps`."""
    init_from: Operational[str | None] = Field(None, min_length=1)
    """Run directory (path or URI) whose model gives the initial weights: RUN_DIR of the same stage,
    or RUN_DIR/STAGE. The weights are part of the identity, not the location.
    """
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial weights, the data order and every random draw."""
    compile: Operational[bool] = False
    """Whether to compile the blocks and the loss with torch.compile."""
    gradient_checkpointing: Operational[bool] = False
    """Whether to recompute activations in the backward pass, which saves memory."""
    log_every: Operational[PositiveInt] = 10
    """Optimizer steps between rows of the table `steps`."""
    eval_every: Operational[PositiveInt | None] = None
    """Optimizer steps between evaluations on held-out data; if not given, after steps 1 to 8, 10,
    12, 14, 16, 20, ..., four for each doubling, and without `monitor` only at the end.
    """
    eval_batch: Operational[PositiveInt | None] = None
    """Samples per worker per forward pass of an evaluation; `micro_batch` if not given."""
    monitor: MonitorSettings | None = MonitorSettings()
    """Selection of the best model by held-out data, and early stopping; null takes the model of the
    last step.
    """
    checkpoint_every: Operational[PositiveInt | None] = None
    """Optimizer steps between checkpoints; if not given, a tenth of the training, and at least 10
    s.
    """
    keep_checkpoints: Operational[PositiveInt] = 2
    """Number of most recent checkpoints that are kept during the training."""
    keep_state: Operational[bool] = True
    """Whether the state after the last step is saved and kept, so that more steps can continue it;
    with Adam it is three times as large as the weights.
    """

    def identity(self) -> dict[str, Any]:
        """Return the values that decide the result.

        A setting is left out where it has no effect. With a monitor, ``eval_every`` has one: it
        decides which steps can be the best one.
        """
        identity = super().identity()
        if self.schedule != "warmup-stable-decay":
            del identity["decay_steps"]
        if self.monitor is not None:
            identity["eval_every"] = self.eval_every
        return identity

    @property
    def length_in(self) -> Literal["steps", "epochs"]:
        """The unit of the length."""
        return "epochs" if self.steps is None else "steps"

    @property
    def length(self) -> int:
        """The length in optimizer steps or epochs."""
        return self.steps or self.epochs or 1

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSettings:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either steps or epochs, not both")
        return self


class ScalingSettings(Settings):
    """Distribution of a training run over workers; it cannot change the result."""

    workers: Operational[PositiveInt | Literal["auto"]] = "auto"
    """Worker processes of the run. auto is one on CPUs and all that fit on the stage's share of the
    GPUs; the batch sizes are those of one worker, and the effective batch is kept.
    """
    gpus_per_worker: Operational[float | None] = Field(None, ge=0)
    """GPUs per worker; 1 on a cluster with GPUs and 0 on CPUs if not given. A fraction shares a
    GPU.
    """
    cpus_per_worker: Operational[PositiveFloat | Literal["auto"]] = "auto"
    """CPU cores that each worker holds, and the number of its threads; auto is one on a GPU, and on
    CPUs an equal share of a node among the stages that can run at the same time.
    """
    strategy: Operational[Literal["ddp", "fsdp"]] = "ddp"
    """Data parallelism with replicated (ddp) or sharded (fsdp) weights."""

    @property
    def worker_count(self) -> int:
        """The number of workers; 1 for ``auto``."""
        return 1 if self.workers == "auto" else self.workers

    @property
    def reserved_cpus(self) -> float:
        """The CPU cores that each worker holds; 1 for ``auto``."""
        return 1.0 if self.cpus_per_worker == "auto" else self.cpus_per_worker

    @property
    def threads(self) -> int:
        """The number of threads of each worker."""
        return max(1, int(self.reserved_cpus))


class LoaderSettings(Settings):
    """Data loading; it cannot change the result."""

    workers: Operational[int] = Field(0, ge=0)
    """Loader processes per worker, each of which reserves a CPU; 0 loads in the worker itself."""
    prefetch: Operational[PositiveInt] = 2
    """Batches that each loader process keeps ready."""
    pin_memory: Operational[bool | None] = None
    """Whether batches are in page-locked memory; by default on a GPU."""


OomStep = Literal["gradient_checkpointing", "fsdp", "shorten", "bf16"]


class TrainStageSettings(Settings):
    """A training stage: ``<stage>.training``, ``<stage>.scaling``, ``<stage>.loader``."""

    training: TrainingSettings = TrainingSettings()
    """Length, optimizer, batch sizes and precision."""
    scaling: ScalingSettings = ScalingSettings()
    """Workers and the resources that each one holds."""
    loader: LoaderSettings = LoaderSettings()
    """Loader processes and prefetching of batches."""
    max_restarts: Operational[int] = Field(3, ge=0)
    """Restarts from the last checkpoint after a worker failure."""
    on_oom: Operational[tuple[OomStep, ...]] = ()
    """Changes that are allowed after an out-of-memory error, beyond a smaller micro-batch. They
    follow in this order at micro-batch 1, one per attempt.
    """
    memory_trial: Operational[int] = Field(0, ge=0)
    """Optimizer steps on the longest samples before a new run, to find a micro-batch that fits."""
    from_sweep: bool = False
    """Whether to train with the settings that the sweep recommends."""

    #: precisions that this training rejects, each with the reason
    unusable: ClassVar[Mapping[Precision, str]] = {}

    def fixed_by(self, length: int) -> str | None:
        """Return why a training of this length is not the beginning of a longer one; else None."""
        training = self.training
        if training.schedule != "constant":
            return f"a {training.schedule} schedule decays up to the last step"
        if 0 < training.warmup_steps < 1:
            return f"warmup_steps = {training.warmup_steps} is a fraction of the length"
        if training.length_in == "steps" and training.warmup_steps > length:
            return f"warmup_steps = {training.warmup_steps} is longer than the training"
        return None

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
        return self.changed("scaling", gpus_per_worker=1.0 if gpus else 0.0)

    def without_selection(self) -> TrainStageSettings:
        """Return the settings with the model of the last step, unless a monitor is given.

        For random data, where there is nothing to learn.
        """
        if self.training.monitor != MonitorSettings():
            return self
        return self.changed("training", monitor=None)

    def changed(self, section: Literal["training", "scaling", "loader"], **values: Any) -> Self:
        """Return the settings with other values in a section, which are not validated."""
        own: Settings = getattr(self, section)
        return self.model_copy(update={section: own.model_copy(update=values)})


def _settle_length(values: Any, levels: Sequence[Level]) -> None:
    """Of steps and epochs, keep the one that the higher level gives."""
    for level in levels:
        training = level.get("training")
        given = [key for key in LENGTH_KEYS if dig(training, key) is not None]
        if given:
            values["training"] |= dict.fromkeys({*LENGTH_KEYS} - {*given})
            return


def _settle_batch_sizes(name: str, values: Any, levels: Sequence[Level]) -> None:
    """Settle micro_batch, accumulation and effective_batch."""
    if not isinstance(values, dict) or not isinstance(values.get("training"), dict):
        return  # a wrong type, which validation reports
    try:
        sizes = [_sizes(level.get("training")) for level in levels]
        scaling = ScalingSettings(workers=dig(values, "scaling", "workers"))
    except ValidationError:
        return  # reported by validation as well
    giver = next(i for i, level in enumerate(levels) if dig(level.values, "scaling", "workers"))
    try:
        plan = batching.resolve(sizes, scaling.worker_count, giver)
    except batching.BatchConflict as error:
        origin = levels[error.level].origin
        raise batching.BatchConflict(error.level, f"{origin}: {name}.training: {error}") from error
    values["training"] |= {key: getattr(plan, key) for key in batching.KEYS}


def _sizes(training: Any) -> dict[str, int]:
    """Return a level's batch sizes as numbers (``1e2``, ``"16"``). Raises ValidationError."""
    given = {key: dig(training, key) for key in batching.KEYS}
    read = TrainingSettings.model_validate(given)
    return {key: getattr(read, key) for key in batching.KEYS if given[key] is not None}


@dataclass(frozen=True)
class Obstacle:
    """A setting that the hardware cannot run; ``advice`` says what to change."""

    key: str
    value: Any
    reason: str
    advice: str


def obstacle(
    stage: str, settings: TrainStageSettings, nodes: Sequence[Hardware]
) -> Obstacle | None:
    """Return the first setting of a training stage that these nodes cannot run, by its full key."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    training, scaling = settings.training, settings.scaling
    each, workers = scaling.gpus_per_worker, scaling.worker_count
    on_gpu = hardware.lowest_compute_capability(nodes) if each != 0 else None
    allowed = hardware.supported_precisions(on_gpu)
    wanted: dict[str, Precision] = {"training.precision": training.precision}
    if "bf16" in settings.on_oom:
        wanted["on_oom"] = "bf16"
    for key, precision in wanted.items():
        if reason := settings.unusable.get(precision):
            return Obstacle(f"{stage}.{key}", precision, reason, "choose another precision")
        if precision not in allowed:
            lacks = f"this {'GPU' if on_gpu else 'CPU'} lacks {precision}"
            advice = f"allowed here: {', '.join(allowed)}"
            return Obstacle(f"{stage}.{key}", precision, lacks, advice)
    kinds = training.optimizer, training.precision
    if training.weights == "bf16" and kinds != ("adafactor", "bf16"):
        reason = f"with optimizer = {kinds[0]} and precision = {kinds[1]}"
        advice = "such weights need adafactor and precision = bf16; use fp32"
        return Obstacle(f"{stage}.training.weights", "bf16", reason, advice)
    if each is None and 0 < len(gpus) < workers:
        reason = f"there are only {len(gpus)} GPU(s) for {workers} workers"
        share = f"set {stage}.scaling.gpus_per_worker to share GPUs (0.5) or to use the CPUs (0)"
        return Obstacle(f"{stage}.scaling.workers", workers, reason, f"lower it, or {share}")
    if each and each < 1 < workers and "fsdp" in (scaling.strategy, *settings.on_oom):
        reason = "workers that share a GPU cannot shard a model (strategy or on_oom: fsdp)"
        advice = "NCCL rejects them; use ddp, or one GPU per worker"
        return Obstacle(f"{stage}.scaling.gpus_per_worker", each, reason, advice)
    if each != 0 and workers > 1 and any(gpu.is_slice for gpu in gpus):
        reason, advice = "NCCL does not connect MIG slices", "use 1 worker, or disable MIG"
        return Obstacle(f"{stage}.scaling.workers", workers, reason, advice)
    return None


def beyond(stage: str, settings: TrainStageSettings, node: Hardware) -> Obstacle | None:
    """Return the first setting for which the workers are larger than a node, by its full key."""
    scaling, workers = settings.scaling, settings.scaling.worker_count
    cpus, gpus = cpus_of_a_worker(settings), scaling.gpus_per_worker or 0.0
    has = node.cpus, len(node.gpus)
    room = min(int(n / each + 1e-9) for n, each in zip(has, (cpus, gpus), strict=True) if each)
    if room >= workers:
        return None
    wrong: tuple[str, float, str] = "scaling.workers", workers, f"give at most {room}"
    if scaling.reserved_cpus > node.cpus:
        wrong = "scaling.cpus_per_worker", scaling.reserved_cpus, "lower it"
    elif gpus > len(node.gpus):
        wrong = "scaling.gpus_per_worker", gpus, "lower it (0 uses the CPUs)"
    elif not room:
        wrong = "loader.workers", settings.loader.workers, "lower it"
    text = "{:g} CPU(s) and {:g} GPU(s)" if gpus else "{:g} CPU(s)"
    loaders = " with its loader processes" if cpus > scaling.reserved_cpus else ""
    reason = f"needs {text.format(cpus, gpus)}{loaders} per worker, and this machine has "
    key, value, advice = wrong
    advice += ", or use a cluster (`raypipe run --address`)"
    return Obstacle(f"{stage}.{key}", value, reason + text.format(*has), advice)


def cpus_of_a_worker(settings: TrainStageSettings) -> float:
    """Return the CPUs that a worker reserves, with those of its loader's processes."""
    return settings.scaling.reserved_cpus + settings.loader.workers


def automatic_workers(
    settings: TrainStageSettings,
    effective_batch: int,
    nodes: Sequence[Hardware],
    trainings: int,
) -> int:
    """Return the number of workers that ``scaling.workers: auto`` stands for.

    On CPUs it is one, since a worker can use many cores. On GPUs it is what fits on an equal share
    of the nodes, at most one worker per sample of a step, and one on MIG slices, which NCCL does
    not connect.

    Args:
        settings: of the training, with ``gpus_per_worker`` resolved.
        effective_batch: samples per optimizer step.
        nodes: the hardware of the cluster.
        trainings: number of trainings that may run at the same time, this one included.

    """
    gpus = settings.scaling.gpus_per_worker
    if not gpus or any(gpu.is_slice for node in nodes for gpu in node.gpus):
        return 1
    cpus = cpus_of_a_worker(settings)
    room = sum(min(int(len(node.gpus) / gpus), int(node.cpus / cpus)) for node in nodes)
    return max(1, min(effective_batch, room // trainings))
