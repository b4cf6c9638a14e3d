"""Trials of a sweep: each point resolved to a training run and its unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypipe.errors import ConfigError
from raypipe.hardware import Hardware
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage, Training, Unit
from raypipe.pipeline.identity import Identity, fingerprint
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.settings import SweepSettings
from raypipe.sweep.space import Point, points
from raypipe.training.batching import BatchConflict
from raypipe.training.requirements import obstacles

#: the training settings that leave the memory of a step of one micro-batch as it is
_SAME_MEMORY = {
    *("micro_batch", "accumulation", "effective_batch", "steps", "epochs", "seed", "clip_norm"),
    *("learning_rate", "betas", "weight_decay", "warmup_steps", "schedule", "log_every"),
    *("eval_every", "eval_batch", "monitor", "checkpoint_every", "keep_checkpoints"),
}
_IDENTITY_LETTERS = 12


@dataclass(frozen=True)
class Trial:
    """A point of a sweep as a training run.

    ``group`` names what shares a memory model (all but the micro-batch is the same),
    ``larger_group`` what takes as much memory or more: with accumulation gradients wait beside
    the next forward. ``parity`` names what has to have the same losses (all but the precision and
    the cut into micro-batches), ``cut`` the latter.
    ``lacks`` says why this hardware cannot run it. A ``reference`` is no point of the sweep: it
    is there for its losses in fp32. One of a population trains from the last checkpoint of the
    trial ``parent`` to the step ``until``.
    """

    unit: Unit
    point: Point
    training: Training
    group: str
    larger_group: str
    parity: str
    lacks: str | None = None
    reference: bool = False
    parent: str | None = None
    until: int | None = None

    @property
    def identity(self) -> Identity:
        """Everything that decides what the trial measures."""
        if self.unit.identity is None:
            raise ValueError(f"trial {self.unit.key}: its identity was not composed")
        return self.unit.identity

    @property
    def micro_batch(self) -> int:
        """Samples a worker a forward."""
        return self.training.settings.training.micro_batch or 1

    @property
    def precision(self) -> str:
        """The arithmetic of the forward and backward."""
        return self.training.settings.training.precision

    @property
    def cut(self) -> tuple[int, int, int]:
        """Micro-batch, accumulation and workers."""
        return self.micro_batch, self.accumulation, self.training.settings.scaling.most_workers

    @property
    def accumulation(self) -> int:
        """Forwards a worker a step."""
        return self.training.settings.training.accumulation or 1


@dataclass(frozen=True)
class TrialMaker:
    """Turns points into trials of one stage of a configuration."""

    configuration: Configuration
    sweep: SweepSettings
    nodes: Sequence[Hardware]

    def trials(self) -> list[Trial]:
        """The trials of all points that the constraints allow, small micro-batches first.

        A systems sweep without the fp32 trial that some losses are compared with has it beside
        its points, with their smallest micro-batch.

        Raises:
            ConfigError: an axis with a key or a value that the configuration does not take, or
                constraints that allow no point.

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
                "that over the workers"
            )
        ordered = sorted(found.values(), key=lambda trial: (trial.micro_batch, trial.accumulation))
        if self.sweep.kind == "systems":
            ordered = [*self._references(ordered), *ordered]
        return ordered

    def trial(self, point: Point) -> Trial | None:
        """The trial of a point by full keys; None where the constraints rule it out."""
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
        identity = self._identity(swept, training)
        settings = training.settings
        kept = settings.training.model_dump(mode="json", exclude=_SAME_MEMORY)
        scaling = settings.scaling.model_dump(mode="json", include={"workers", "strategy"})
        rest = dict(identity.shared)
        same = [stage, sweep.kind, rest, kept, scaling]
        decisive = settings.training.identity()
        del decisive["precision"]
        return Trial(
            trial_unit(stage, identity),
            point,
            training,
            group=fingerprint([*same, (settings.training.accumulation or 1) > 1]),
            larger_group=fingerprint([*same, True]),
            parity=fingerprint([stage, rest, decisive, settings.training.effective_batch]),
            lacks=next((o.reason for o in obstacles(settings, self.nodes)), None),
        )

    @property
    def device(self) -> tuple[str, int | None]:
        """The name and the memory in bytes of the smallest GPU; without one ("cpu", None)."""
        section = getattr(self.configuration.settings, self.sweep.stage)
        gpus = [gpu for node in self.nodes for gpu in node.gpus]
        if not gpus or section.scaling.gpus_per_worker == 0:
            return "cpu", None
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        return smallest.name, smallest.memory_bytes

    def key(self, name: str) -> str:
        """The full key of an axis, which may be one of the stage's own."""
        first = name.partition(".")[0]
        full = first in type(self.configuration.settings).model_fields
        return name if full else f"{self.sweep.stage}.{name}"

    def _identity(self, swept: Stage, training: Training) -> Identity:
        """Return everything that decides what a trial measures, including its speed."""
        settings, sweep = training.settings, self.sweep
        literals: dict[str, Any] = {
            "training": settings.training.model_dump(mode="json"),
            "scaling": settings.scaling.model_dump(mode="json"),
            "loader": settings.loader.model_dump(mode="json"),
            "kind": sweep.kind,
            "device": self.device[0],
        }
        if sweep.scheduler in ("asha", "median"):
            ended = {"scheduler", "grace_steps", "reduction_factor", "metric", "mode"}
            literals["sweep"] = sweep.model_dump(mode="json", include=ended)
        of_stage = without_training(swept)
        return Identity.of(of_stage.shared, {**of_stage.literals, **literals}, of_stage.needs)

    def _references(self, trials: Iterable[Trial]) -> Iterator[Trial]:
        """The fp32 trials that are missing, one for each group of equal losses."""
        grouped: dict[str, list[Trial]] = {}
        for trial in trials:
            grouped.setdefault(trial.parity, []).append(trial)
        for group in grouped.values():
            precisions = {trial.precision for trial in group}
            if "fp32" in precisions:
                continue
            point = group[0].point | {f"{self.sweep.stage}.training.precision": "fp32"}
            if (reference := self.trial(point)) is not None:
                yield replace(reference, reference=True)


def trial_unit(stage: str, identity: Identity) -> Unit:
    """Return a trial's unit, whose key is the hash of its identity."""
    key = f"sweep/{stage}/{identity.fingerprint[:_IDENTITY_LETTERS]}"
    return Unit(key, identity=identity)


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
    """The optimiser steps of a training whose batch sizes are resolved."""
    settings, workers = training.settings.training, training.settings.scaling.most_workers
    cut = (settings.micro_batch or 1) * (settings.accumulation or 1) * workers
    phases = training.task(run).phases(settings, settings.effective_batch or cut)
    return sum(phase.steps for phase in phases)


def training_stage(stages: Sequence[Stage], name: str, where: str) -> tuple[Stage, Training]:
    """Return a training stage that is named at ``where``, and its training. Raises ConfigError."""
    trained = {
        stage.name: (stage, stage.training) for stage in stages if stage.training is not None
    }
    if name not in trained:
        raise ConfigError(
            f"{where} = {name!r}: must be a training stage of the experiment "
            f"(there are: {', '.join(trained) or 'none'})"
        )
    return trained[name]


def shown(point: Mapping[str, Any]) -> str:
    """A point in a few words: the last part of each key, and its value."""
    words = []
    for key, value in point.items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        words.append(f"{key.rpartition('.')[2]}={text}")
    return " ".join(words)
