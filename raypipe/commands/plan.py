"""``raypipe plan``, and what every command decides before it starts: its stages, and what fits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from raypipe import hardware
from raypipe.commands.configuration import declared, resolve
from raypipe.config.document import Document
from raypipe.config.matrix import SEED, MatrixSettings, point_text
from raypipe.config.validation import near_and_all
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.progress import Durations
from raypipe.graph.stored_results import Resumed, resume, unfinished
from raypipe.hardware import Hardware, unusable_gpus
from raypipe.report.formatting import duration
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import RunDirectory
from raypipe.study.loop import Source, StudyGraph
from raypipe.study.placement import Placement
from raypipe.study.sweep_settings import SWEEP
from raypipe.training.settings import Obstacle, TrainStageSettings, beyond, obstacle


@dataclass(frozen=True)
class Work:
    """Work of a command: the graph of a configuration on this hardware.

    ``note`` says what a matrix leaves out.
    """

    configuration: Configuration
    graph: StudyGraph
    nodes: Sequence[Hardware]
    note: str

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self.configuration.experiment.name

    def resumed(self, run_dir: RunDirectory, ledger: Ledger, *, code: bool = True) -> Resumed:
        """Return what is asked of a run directory; ``code`` compares the source code, too.

        Raises:
            ConfigError: as :func:`resume`.

        """
        entries = {"run": {"experiment": self.name}, **self.graph.entries(ledger)}
        source = self.configuration.source() if code else None
        return resume(run_dir, ledger, entries, self.graph.known, source)

    def check(self, *, may_grow: bool) -> None:
        """Reject a training that the hardware cannot run. Raises ConfigError.

        Unless nodes ``may_grow``, also workers and tasks that are larger than the only one.
        """
        check_gpus(self.configuration, self.nodes, self.graph.probed.stages.values())
        for where, name, section in self._sections():
            if isinstance(section, TrainStageSettings):
                _refuse(where, obstacle(name, section, self.nodes))
        node = self.nodes[0]
        for where, name, section in () if may_grow else self._sections():
            if isinstance(section, TrainStageSettings):
                _refuse(where, beyond(name, section, node))
            for key, unit, has in (("cpus", "CPUs", node.cpus), ("gpus", "GPUs", len(node.gpus))):
                asked = getattr(section, key, None)
                if isinstance(asked, int | float) and asked > has:
                    reason, advice = f"this machine has {has or 'no'} {unit}", "lower it"
                    dotted = f"{name}.{key}".removeprefix(".")
                    _refuse(where, Obstacle(dotted, asked, reason, advice))

    def check_shared(self, location: str | os.PathLike[str] | None) -> None:
        """Reject a run that several commands cannot share. Raises ConfigError."""
        if location is None:
            raise ConfigError("--shared: give --run-dir, the same to all commands")
        if "://" in (run := RunDirectory.at(os.fspath(location))).location:
            raise ConfigError(
                f"--run-dir {run.shown}: several jobs can share a run only on a file system, by "
                "its locks; use a path on storage that all nodes mount"
            )
        if (source := self.graph.source(None)).metrics:
            raise ConfigError(
                f"{self.configuration.origin}: matrix.{source.table}: several jobs cannot share "
                "it, since its points follow from the results of earlier ones; use one job, with "
                "more nodes"
            )

    def _sections(self) -> Iterator[tuple[str, str, object]]:
        """Yield each section with its name, and where it is from: the configuration or a point.

        The top level, whose name is empty, is the first.
        """
        origin, graph = self.configuration.origin, self.graph
        yield origin, "", self.configuration.settings
        for name, section in self.configuration.settings:
            yield origin, name, section
        for stage in graph.probed.stages.values():
            if stage.variant in graph.probed.variants:
                where = f"{origin}: matrix ({point_text(graph.probed.variants[stage.variant])})"
                yield where, stage.name, getattr(stage.settings, stage.name, None)


def work_of(configuration: Configuration, only: Sequence[str], nodes: Sequence[Hardware]) -> Work:
    """Return the work of the wanted stages and of what they need, the sweep included.

    With a matrix the sweep is left out, and a sweep alone (``only``) runs without the matrix.

    Raises:
        ConfigError: a stage that does not exist, a matrix that cannot be, or a stage of a matrix
            that takes its settings from the sweep.

    """
    origin, settings = configuration.origin, configuration.settings
    sweep, note = settings.sweep, ""
    if settings.matrix is not None and settings.matrix.keys and sweep is not None:
        if list(only) == [SWEEP]:
            configuration = configuration.with_values({"matrix": None}, "the sweep")
        elif getattr(settings, sweep.stage).from_sweep:
            raise ConfigError(
                f"{origin}: {sweep.stage}.from_sweep: a matrix cannot take settings from the "
                "sweep; run `raypipe sweep` first, and write what it recommends into the section"
            )
        else:
            note = "the sweep is left out of the matrix; `raypipe sweep` runs it"
            configuration = configuration.with_values({SWEEP: None}, "the matrix")
    graph = _study_of(configuration, nodes)
    names = list(dict.fromkeys(stage.name for stage in graph.probed.stages.values()))
    for name in (name for name in only if name not in names):
        if name != SWEEP:
            raise ConfigError(f"--only {name}: unknown stage{near_and_all(name, names)}")
        raise ConfigError(
            f"{origin}: has no sweep of a stage that it trains: give it a section, such as "
            "`sweep: {stage: train, axes: {training.micro_batch: [16, 32]}}`"
        )
    return Work(configuration, replace(graph, only=tuple(only)), nodes, note)


def _study_of(configuration: Configuration, nodes: Sequence[Hardware]) -> StudyGraph:
    """Return the study of a configuration: a grid, a search or a race.

    Raises:
        ConfigError: a key, value, table or column that does not exist, or too few points.

    """
    matrix: MatrixSettings = configuration.settings.matrix or MatrixSettings()
    points = list(matrix.all_points())
    placement = Placement(configuration, matrix, lambda varied: _stages(varied, nodes))
    tables = declared(configuration.experiment)
    source: Callable[[Ledger | None], Source] | None = None
    if matrix.race is not None:
        from raypipe.study.race import race_of

        source = race_of(configuration, matrix.race, tables, points)
        points = [point for point in source(None).expected() if point[SEED] < 2]
    if not points:
        raise ConfigError(f"{configuration.origin}: matrix: every point is excluded")
    built = list(map(placement.build, points))
    if matrix.search is not None:
        from raypipe.study.search import probes, search_of

        built += probes(matrix.search, points[0], placement)
        source = search_of(configuration, matrix, tables, nodes, built[-1].settings)
    text = f"matrix: {len(points)} points" if matrix.keys else ""
    placement.learn(built)
    return StudyGraph(
        placement,
        built,
        source or (lambda _: Source(points, text, is_compared=len(points) > 1)),
    )


def _stages(configuration: Configuration, nodes: Sequence[Hardware]) -> list[Stage]:
    """Return the stages of a configuration, with its sweep. Raises ConfigError."""
    plain = list(configuration.stages())
    takes = any(s.training is not None and s.training.settings.from_sweep for s in plain)
    if configuration.settings.sweep is None and not takes:
        return plain
    from raypipe.study.sweep import with_sweep  # with all that a sweep needs

    return with_sweep(configuration, nodes)


def check_gpus(
    configuration: Configuration, nodes: Sequence[Hardware], stages: Collection[Stage]
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


def _refuse(where: str, found: Obstacle | None) -> None:
    if found is not None:
        raise ConfigError(f"{where}: {found.key} = {found.value}: {found.reason}; {found.advice}")


def plan(
    document: Document,
    overrides: Sequence[str],
    run_dir: str | os.PathLike[str] | None,
    profile: str,
    only: Sequence[str],
) -> list[Row]:
    """Return a row per stage: its units, how many are finished, and their workload.

    What this machine cannot run is planned as well, since a cluster may.
    """
    nodes = [hardware.detect()]
    work = work_of(resolve(document, overrides, profile, nodes), only, nodes)
    graph, ledger, stored = work.graph, None, set[str]()
    if run_dir is not None:
        run = RunDirectory.at(os.fspath(run_dir))
        run.check_new()
        ledger = Ledger(run, writable=False)
        if ledger.damage:
            print(f"{run.shown}: the ledger is damaged: {ledger.damage}", file=sys.stderr)
        resumed = work.resumed(run, ledger, code=False)
        if resumed.is_stored:  # to look at each unit again would take as long as all else
            stored = {stage.key for stage in resumed.stages}
    if graph.probed.variants and graph.text:
        print(graph.text)
    by_name: dict[str, list[tuple[Stage, Sequence[Unit]]]] = {}
    for stage in graph.at_most(ledger):
        todo = stage.units
        if stage.key in stored:
            todo = []
        elif ledger is not None:
            todo = unfinished(stage, stage.seen(ledger))
        by_name.setdefault(stage.name, []).append((stage, todo))
    durations, is_varied = Durations(nodes), bool(graph.probed.variants)
    return [_row(stages, durations, is_varied=is_varied) for stages in by_name.values()]


def _row(
    stages: Sequence[tuple[Stage, Sequence[Unit]]], durations: Durations, *, is_varied: bool
) -> Row:
    """Return the row of a stage in all of its variants, each with the units that are to do."""
    total = sum(len(stage.units) for stage, _ in stages)
    left = sum(len(todo) for _, todo in stages)
    workloads = list(dict.fromkeys(stage.workload for stage, _ in stages))
    known = [each for each in durations.estimates(stages).values() if each is not None]
    time, cpu_h, gpu_h = ("unknown",) * 3 if left else ("done", "0", "0")
    if left and len(known) == len(stages) and any(each.seconds for each in known):
        time = duration(sum(each.seconds for each in known))  # one after the other
        cpu_h = f"{sum(each.cpu_s for each in known) / 3600:.3g}"
        gpu_h = f"{sum(each.gpu_s for each in known) / 3600:.3g}"
    return {
        "stage": stages[0][0].name,
        "needs": ", ".join(stages[0][0].needs),
        **({"variants": len(stages)} if is_varied else {}),
        "units": total,
        "done": total - left,
        "to do": left,
        "workload": workloads[0] + (" (varied)" if len(workloads) > 1 else ""),
        "time": time,
        "CPU h": cpu_h,
        "GPU h": gpu_h,
    }
