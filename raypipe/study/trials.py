"""Trials of a sweep: each point as a training run with its unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypipe.config.matrix import Point
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Stage, Training, Unit
from raypipe.graph.identity import Identity, fingerprint
from raypipe.hardware import Hardware
from raypipe.scripts.command import ScriptStageSettings
from raypipe.scripts.experiment import ScriptTask
from raypipe.store.run_directory import RunDirectory
from raypipe.study.space import points
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.batching import BatchConflict
from raypipe.training.requirements import obstacles


@dataclass(frozen=True)
class Trial:
    """A point of a sweep as a training run.

    ``parity`` identifies trials that must have the same losses (equal but for precision and
    micro-batches); ``cut`` tells those apart. ``lacks`` says why this hardware cannot run the
    trial. A ``reference`` is not a point of the sweep: it gives the losses in fp32. ``repeats`` is
    the key of the trial that it measures again, as the given ``measurement``.
    """

    unit: Unit
    point: Point
    training: Training
    parity: str
    lacks: str | None = None
    reference: bool = False
    repeats: str | None = None
    measurement: int = 1

    def needs_more_than(self, other: Trial) -> bool:
        """Whether the trial is another one with a larger micro-batch, and certainly needs more."""
        if self.accumulation == 1 < other.accumulation:  # which also keeps gradients
            return False
        same = self.point.keys() == other.point.keys() and all(
            value == other.point[key] or key.endswith(".training.micro_batch")
            for key, value in self.point.items()
        )
        return same and self.micro_batch > other.micro_batch

    def again(self, number: int) -> Trial:
        """Return the trial that measures this one again, as the given number."""
        unit = Unit(f"{self.unit.key}-{number}", identity=self.unit.identity)
        return replace(self, unit=unit, repeats=self.unit.key, measurement=number)

    @property
    def micro_batch(self) -> int:
        """Samples per worker per forward pass."""
        return self.training.settings.training.micro_batch or 1

    @property
    def precision(self) -> str:
        """The precision of the forward and backward pass."""
        return self.training.settings.training.precision

    @property
    def cut(self) -> tuple[int, int, int]:
        """Micro-batch, accumulation and workers."""
        return self.micro_batch, self.accumulation, self.training.settings.scaling.worker_count

    @property
    def accumulation(self) -> int:
        """Forward passes per worker per optimizer step."""
        return self.training.settings.training.accumulation or 1


@dataclass(frozen=True)
class TrialMaker:
    """Makes trials from points, for one stage of a configuration.

    ``exact`` rules out a script's batch sizes whose product is not the constraint's.
    """

    configuration: Configuration
    sweep: SweepSettings
    nodes: Sequence[Hardware]
    exact: bool = True

    def trials(self) -> list[Trial]:
        """Return the trials of all points that the constraints allow, small micro-batches first.

        A systems sweep also gets the fp32 references that its losses need and that it lacks, with
        the smallest micro-batch of its points.

        Raises:
            ConfigError: an axis has a key or a value that the configuration rejects, or the
                constraints allow no point.

        """
        axes = {self.key(name): axis for name, axis in self.sweep.axes.items()}
        found: dict[str, Trial] = {}
        for point in points(axes, self.sweep.samples, self.sweep.seed):
            if (trial := self.trial(point)) is None:
                continue
            other = found.setdefault(trial.unit.key, trial)
            if other.point != point:
                keys = ", ".join(key for key in point if point[key] != other.point[key])
                raise ConfigError(
                    f"{self.configuration.origin}: sweep.axes: {keys}: {shown(other.point)} and "
                    f"{shown(point)} are the same training of {self.sweep.stage}; drop the axis, "
                    "or make its key part of the stage's identity"
                )
        if not found:
            raise ConfigError(
                f"{self.configuration.origin}: sweep: no point has training.effective_batch = "
                f"{self.sweep.constraints.effective_batch}; give micro-batches that are at most "
                "that over the workers (those of a script must divide it)"
            )
        ordered = sorted(found.values(), key=lambda trial: (trial.micro_batch, trial.accumulation))
        if self.sweep.kind == "systems":
            ordered = [*self._references(ordered), *ordered]
        return ordered

    def trial(self, point: Point) -> Trial | None:
        """Return the trial of a point by full keys; None if the constraints rule it out."""
        stage, sweep = self.sweep.stage, self.sweep
        values: dict[str, Any] = {**point, f"{stage}.from_sweep": False}
        if sweep.constraints.effective_batch is not None:
            values[f"{stage}.training.effective_batch"] = sweep.constraints.effective_batch
        if sweep.kind == "systems":
            values[f"{stage}.training.steps"] = sweep.warmup_steps + sweep.steps
            values[f"{stage}.training.log_every"] = sweep.warmup_steps
        try:
            varied = self.configuration.with_values(
                values, f"{self.configuration.origin}: sweep.axes"
            )
        except BatchConflict:
            if sweep.constraints.effective_batch is None:
                raise
            return None
        swept, training = training_stage(varied.stages(), stage, "sweep.stage")
        if self.exact and sweep.constraints.effective_batch and not _is_exact(training):
            return None
        identity = self.identity(swept, training)
        settings = training.settings
        decisive = {**settings.training.identity(), "precision": None}
        return Trial(
            Unit(f"sweep/{stage}/{identity.fingerprint[:12]}", identity=identity),
            point,
            training,
            parity=fingerprint(
                [stage, dict(identity.shared), decisive, settings.training.effective_batch]
            ),
            lacks=next((each.reason for each in obstacles(stage, settings, self.nodes)), None),
        )

    @property
    def device(self) -> tuple[str, int | None]:
        """The name and the memory in bytes of the smallest GPU; ("cpu", None) without one."""
        section = getattr(self.configuration.settings, self.sweep.stage)
        gpus = [gpu for node in self.nodes for gpu in node.gpus]
        if not gpus or section.scaling.gpus_per_worker == 0:
            return "cpu", None
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        return smallest.name, smallest.memory_bytes

    def key(self, name: str) -> str:
        """Return the full key of an axis, which may be relative to the swept stage."""
        first = name.partition(".")[0]
        full = first in type(self.configuration.settings).model_fields
        return name if full else f"{self.sweep.stage}.{name}"

    def identity(self, swept: Stage, training: Training) -> Identity:
        """Return all values that can change what a trial measures, its speed included."""
        settings, sweep = training.settings, self.sweep
        literals: dict[str, Any] = {
            "training": settings.training.model_dump(mode="json", exclude={"init_from"}),
            "scaling": settings.scaling.model_dump(mode="json"),
            "loader": settings.loader.model_dump(mode="json"),
            "kind": sweep.kind,
            "device": self.device[0],
        }
        if sweep.scheduler is not None:
            ended = {"scheduler", "metric", "mode"}
            literals["sweep"] = sweep.model_dump(mode="json", include=ended)
        of_stage = without_training(swept)
        if extents := swept.units[0].extents:  # other trainings that it needs
            literals["extents"] = extents
        return Identity.of(of_stage.shared, {**of_stage.literals, **literals}, of_stage.needs)

    def _references(self, trials: Sequence[Trial]) -> Iterator[Trial]:
        """Yield the missing fp32 references, one per group of equal losses."""
        exact = {trial.parity for trial in trials if trial.precision == "fp32"}
        for parity, trial in {t.parity: t for t in reversed([*trials])}.items():
            point = trial.point | {f"{self.sweep.stage}.training.precision": "fp32"}
            if parity not in exact and (reference := self.trial(point)) is not None:
                yield replace(reference, reference=True)


def without_training(stage: Stage) -> Identity:
    """Return the identity of a training stage without its own `training` settings."""
    identity = stage.units[0].identity
    if identity is None:
        raise ValueError(f"stage {stage.name}: its identity was not composed")
    own = {
        name: value
        for name, value in identity.shared.get(stage.name, {}).items()
        if name not in ("training", "from_sweep")
    }
    return Identity.of({**identity.shared, stage.name: own}, identity.literals, identity.needs)


def total_steps(training: Training, run: RunDirectory) -> int:
    """Return the optimizer steps of a training whose batch sizes are resolved."""
    settings, workers = training.settings.training, training.settings.scaling.worker_count
    cut = (settings.micro_batch or 1) * (settings.accumulation or 1) * workers
    phases = training.task(run).phases(settings, settings.effective_batch or cut)
    return sum(phase.steps for phase in phases)


def check_counts_steps(training: Training, where: str, what: str, instead: str = "") -> None:
    """Reject a script that receives its length in epochs, for trials of a few steps.

    Raises:
        ConfigError: it does; ``where`` is the stage, ``what`` measures it, ``instead`` is advice.

    """
    task = training.task(None) if isinstance(training.settings, ScriptStageSettings) else None
    if isinstance(task, ScriptTask) and "epochs" in task.used:
        raise ConfigError(
            f"{where}: the script receives {{epochs}}, and {what} counts steps; use {{steps}}"
            f"{instead}"
        )


def _is_exact(training: Training) -> bool:
    """Whether a step has the effective batch: raypipe's own loop shortens micro-batches for it.

    A script that receives the micro-batch and the accumulation takes their product.
    """
    if not isinstance(training.settings, ScriptStageSettings):
        return True
    task, sizes = training.task(None), training.settings.training
    if isinstance(task, ScriptTask) and "effective_batch" in task.used:
        return True
    product = (sizes.micro_batch or 1) * (sizes.accumulation or 1)
    return product * training.settings.scaling.worker_count == sizes.effective_batch


def training_stage(stages: Sequence[Stage], name: str, where: str) -> tuple[Stage, Training]:
    """Return the training stage named at ``where``, and its training. Raises ConfigError."""
    trained = {
        stage.name: (stage, stage.training) for stage in stages if stage.training is not None
    }
    if name not in trained:
        raise ConfigError(
            f"{where} = {name!r}: must be a training stage of the experiment "
            f"(there are: {', '.join(trained) or 'none'})"
        )
    return trained[name]


def trainings(configuration: Configuration, stage: str | None) -> list[tuple[str, Training]]:
    """Return the training stages of a configuration by name, or the one of ``--stage``.

    Raises:
        ConfigError: there is no such training stage, or none at all.

    """
    stages = configuration.stages()
    if stage is not None:
        return [(stage, training_stage(stages, stage, "command line: --stage")[1])]
    found = [(each.name, each.training) for each in stages if each.training is not None]
    if not found:
        raise ConfigError(f"{configuration.origin}: no stage of this experiment trains a model")
    return found


def shown(point: Mapping[str, Any]) -> str:
    """Return a point as text: the last part of each key, and its value."""
    words = []
    for key, value in point.items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        words.append(f"{key.rpartition('.')[2]}={text}")
    return " ".join(words)
