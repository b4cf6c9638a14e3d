"""The stages that a command runs, and the checks before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raypipe.commands.declarations import declared
from raypipe.config.matrix import point_text
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Stage
from raypipe.hardware import Hardware, unusable_gpus
from raypipe.store.ledger import Row
from raypipe.study.loop import StudyGraph
from raypipe.study.matrix import study_of
from raypipe.study.sweep_settings import SWEEP
from raypipe.training.requirements import Obstacle, beyond, obstacles
from raypipe.training.settings import TrainStageSettings


def matrix_or_sweep(configuration: Configuration, only: Sequence[str]) -> tuple[Configuration, str]:
    """Return a configuration without its sweep if it has a matrix, and a message that says so.

    A sweep alone (``only``) runs without the matrix. The message of a run that also trains the
    swept stage says that the training does not use the sweep.

    Raises:
        ConfigError: a stage of the matrix takes its settings from the sweep.

    """
    matrix, sweep = configuration.settings.matrix, configuration.settings.sweep
    if matrix is None or not matrix.keys or sweep is None:
        return configuration, _unused(configuration, only)
    if list(only) == [SWEEP]:
        return configuration.with_values({"matrix": None}, "the sweep"), ""
    if getattr(configuration.settings, sweep.stage).from_sweep:
        raise ConfigError(
            f"{configuration.origin}: {sweep.stage}.from_sweep: a matrix cannot take settings from "
            "the sweep; run `raypipe sweep` first, and write what it recommends into the section"
        )
    message = "the sweep is left out of the matrix; `raypipe sweep` runs it"
    return configuration.with_values({SWEEP: None}, "the matrix"), message


def _unused(configuration: Configuration, only: Sequence[str]) -> str:
    """Return a message if a run sweeps a stage, and trains it without what the sweep recommends."""
    sweep = configuration.settings.sweep
    if sweep is None or (only and not {SWEEP, sweep.stage} <= set(only)):
        return ""
    section = getattr(configuration.settings, sweep.stage, None)
    if not isinstance(section, TrainStageSettings) or section.from_sweep:
        return ""
    return (
        f"{sweep.stage}: does not use what the sweep recommends ({sweep.stage}.from_sweep = false; "
        "true trains with it)"
    )


def selected(
    configuration: Configuration, only: Sequence[str], nodes: Sequence[Hardware]
) -> StudyGraph:
    """Return the graph of the wanted stages and what they need, the sweep included.

    Raises:
        ConfigError: a stage that does not exist, or a matrix that cannot be.

    """
    origin = configuration.origin
    tables = declared(configuration.experiment)
    graph = study_of(configuration, lambda varied: _stages(varied, nodes), tables, nodes)
    names = list(dict.fromkeys(stage.name for stage in graph.stages))
    for name in only:
        if name not in names:
            if name == SWEEP and (sweep := configuration.settings.sweep) is not None:
                raise ConfigError(
                    f"{origin}: sweep.stage = {sweep.stage!r}: this run takes a model that ships; "
                    "to sweep its training, let the run train it"
                )
            if name == SWEEP:
                raise ConfigError(
                    f"{origin}: has no sweep: give it a section, such as "
                    "`sweep: {stage: train, axes: {training.micro_batch: [16, 32]}}`"
                )
            raise ConfigError(
                f"--only {name}: unknown stage{did_you_mean(name, names)} "
                f"(there are: {', '.join(names)})"
            )
    return replace(graph, only=tuple(only))


def _stages(configuration: Configuration, nodes: Sequence[Hardware]) -> list[Stage]:
    """Return the stages of a configuration, with its sweep. Raises ConfigError."""
    plain = list(configuration.stages())
    takes = any(s.training is not None and s.training.settings.from_sweep for s in plain)
    if configuration.settings.sweep is None and not takes:
        return plain
    from raypipe.study.sweep import with_sweep  # with all that a sweep needs

    return with_sweep(configuration, nodes)


def run_entry(configuration: Configuration) -> dict[str, Row]:
    """Return the entry of a ledger that names the experiment of its run."""
    return {"run": {"experiment": configuration.experiment.name}}


def check_training(
    configuration: Configuration, graph: StudyGraph, nodes: Sequence[Hardware]
) -> None:
    """Reject a training that the hardware cannot run. Raises ConfigError."""
    check_gpus(configuration, nodes, graph.stages)
    for where, name, section in _sections(configuration, graph):
        if isinstance(section, TrainStageSettings):
            _refuse(where, obstacles(name, section, nodes))


def check_gpus(
    configuration: Configuration, nodes: Sequence[Hardware], stages: Sequence[Stage]
) -> None:
    """Reject work on GPUs if there are GPUs and none of them can be used.

    It would compute on the CPUs instead. Raises ConfigError.
    """
    problem = unusable_gpus(nodes)
    names, sweep = {stage.name for stage in stages}, configuration.settings.sweep
    if sweep is not None and SWEEP in names:
        names.add(sweep.stage)
    sections = (section for name, section in configuration.settings if name in names)
    trainings = [each for each in sections if isinstance(each, TrainStageSettings)]
    on_gpu = any(stage.on_gpu for stage in stages)
    if problem and (on_gpu or any(each.scaling.gpus_per_worker != 0 for each in trainings)):
        raise ConfigError(
            f"{configuration.origin}: no GPU can be used: {problem}; to compute on the CPUs, hide "
            "the GPUs: set CUDA_VISIBLE_DEVICES to an empty value"
        )


def check_size(configuration: Configuration, graph: StudyGraph, node: Hardware) -> None:
    """Reject workers and tasks that are larger than the only node of a cluster that cannot grow.

    Raises:
        ConfigError: the key, its value, and what the node has.

    """
    for where, name, section in _sections(configuration, graph):
        if isinstance(section, TrainStageSettings):
            _refuse(where, beyond(name, section, node))
        for key, unit, has in (("cpus", "CPUs", node.cpus), ("gpus", "GPUs", len(node.gpus))):
            asked = getattr(section, key, None)
            if isinstance(asked, int | float) and asked > has:
                reason, advice = f"this machine has {has or 'no'} {unit}", "lower it"
                dotted = f"{name}.{key}".removeprefix(".")
                _refuse(where, [Obstacle(dotted, asked, reason, advice)])


def left_out_locally(configuration: Configuration, graph: StudyGraph) -> list[str]:
    """Return the settings that a run in one process does not follow, each with what it does."""
    found = {}
    for _, name, section in _sections(configuration, graph):
        if isinstance(section, TrainStageSettings):
            if (workers := section.scaling.workers) not in (1, "auto"):
                found[f"{name}.scaling.workers"] = f"{workers}: 1, with the same effective batch"
            if processes := section.loader.workers:
                found[f"{name}.loader.workers"] = f"{processes}: 0"
    sweep = configuration.settings.sweep
    if sweep is not None and sweep.scheduler is not None:
        found["sweep.scheduler"] = f"{sweep.scheduler.name}: no trial is ended early"
    return [f"{key} = {text}" for key, text in found.items()]


def misfits(configuration: Configuration, graph: StudyGraph, nodes: Sequence[Hardware]) -> str:
    """Return why this machine cannot run the graph; empty if it can."""
    try:
        check_training(configuration, graph, nodes)
        check_size(configuration, graph, nodes[0])
    except ConfigError as error:
        return str(error)
    return ""


def _refuse(where: str, found: Sequence[Obstacle]) -> None:
    for obstacle in found:
        raise ConfigError(
            f"{where}: {obstacle.key} = {obstacle.value}: {obstacle.reason}; {obstacle.advice}"
        )


def _sections(configuration: Configuration, graph: StudyGraph) -> Iterator[tuple[str, str, object]]:
    """Yield each section with its name, and where it is from: the configuration or a point.

    The top level, whose name is empty, is the first.
    """
    origin = configuration.origin
    yield origin, "", configuration.settings
    for name, section in configuration.settings:
        yield origin, name, section
    for stage in graph.stages:
        if stage.variant in graph.variants:
            where = f"{origin}: matrix ({point_text(graph.variants[stage.variant])})"
            yield where, stage.name, getattr(stage.settings, stage.name, None)
