"""What an experiment is: settings, and stages that need each other.

An experiment is a Python module with a variable ``EXPERIMENT``. Its settings are a pydantic
model whose fields are the sections of the YAML file; ``stages`` turns validated settings
into stages. A stage says which units of work it holds, each with what decides its result, so
that the runner knows before it starts anything what is done, what is new and what would
contradict what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    import pandas as pd

    from raypipe.pipeline.context import StageContext
    from raypipe.report.plots import Figure
    from raypipe.storage.run_directory import RunDirectory
    from raypipe.sweep.presets import Preset
    from raypipe.training.settings import TrainStageSettings
    from raypipe.training.task import TrainTask


@dataclass(frozen=True)
class Unit:
    """A piece of work with a result that is stored once.

    ``slot`` names its place in the run (``train_small``, ``lda/20news/ga/0``): a slot holds
    one result, and asking for another identity in the same slot is refused. ``extent`` is how
    much of it is wanted, where more can be added later (evaluations of a study); 1 otherwise.
    """

    slot: str
    identity: Mapping[str, Any]
    extent: int = 1
    extent_key: str = ""


@dataclass(frozen=True)
class Training:
    """What a training stage trains: its section of the configuration, and the task.

    ``build_task`` makes the task when it is needed (it imports torch), from what the stages before
    left in the run directory; ``raypipe fit`` gives None, since no stage ran before it: the task
    then makes up samples of the greatest size. ``identity`` is what decides the result beside
    ``settings.training``.
    """

    settings: TrainStageSettings
    build_task: Callable[[RunDirectory | None], TrainTask]
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """A step of the experiment.

    ``run`` does the units that are not done yet; it asks the context which are. ``cost`` says
    in a few words what a unit takes (``"200 steps of 16"``). A ``derived`` stage only
    summarises others: it is repeated whenever anything before it ran or its identity changed.
    ``training`` is what a sweep can vary, in a stage that is a training run. A stage that works
    ``on_gpu``, where there are GPUs, runs beside the others; those of a kind run one after another.
    """

    name: str
    run: Callable[[StageContext], None]
    units: Sequence[Unit]
    needs: tuple[str, ...] = ()
    cost: str = ""
    derived: bool = False
    training: Training | None = None
    on_gpu: bool = False


@dataclass(frozen=True)
class Experiment:
    """An experiment by name: its settings, its stages, its figures.

    ``version`` is part of every unit's identity; raise it when results change. ``stages`` may
    read data and raises ``ConfigError`` (or any ``ValueError``) for settings that cannot work.
    ``presets`` are batch sizes published for some cards, which ``raypipe fit`` shows, too.
    """

    name: str
    version: int
    settings: type[BaseModel]
    stages: Callable[[Any], Sequence[Stage]]
    figures: Callable[[Mapping[str, pd.DataFrame]], Sequence[Figure]] | None = None
    presets: tuple[Preset, ...] = ()


def in_order(stages: Sequence[Stage]) -> list[Stage]:
    """The stages so that each comes after what it needs, otherwise as given.

    Raises:
        ValueError: a need that no stage fulfils, a name used twice, or a cycle.

    """
    named = {stage.name: stage for stage in stages}
    if len(named) != len(stages):
        raise ValueError("two stages have the same name")
    ordered: dict[str, Stage] = {}

    def visit(stage: Stage, above: tuple[str, ...]) -> None:
        if stage.name in ordered:
            return
        if stage.name in above:
            raise ValueError(f"stages need each other: {' -> '.join((*above, stage.name))}")
        for need in stage.needs:
            if need not in named:
                raise ValueError(f"stage {stage.name!r} needs {need!r}, which does not exist")
            visit(named[need], (*above, stage.name))
        ordered[stage.name] = stage

    for stage in stages:
        visit(stage, ())
    return list(ordered.values())


def with_needs(stages: Sequence[Stage], wanted: Sequence[str]) -> list[Stage]:
    """The wanted stages and everything they need, in order."""
    named = {stage.name: stage for stage in stages}
    keep: set[str] = set()
    pending = list(wanted)
    while pending:
        name = pending.pop()
        if name not in keep:
            keep.add(name)
            pending += named[name].needs
    return [stage for stage in in_order(stages) if stage.name in keep]
