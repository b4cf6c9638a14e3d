"""``raypipe run``: run an experiment, or continue it."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from raypipe import faults, import_path
from raypipe.commands import RUNS, cluster, runs_location
from raypipe.commands.code import ExperimentCode, after_edit, code_of
from raypipe.commands.configuration import resolve
from raypipe.commands.declarations import declared, of_report, results_of
from raypipe.commands.selection import (
    check_size,
    check_training,
    left_out_locally,
    matrix_or_sweep,
    run_entry,
    selected,
)
from raypipe.commands.time_budget import TimeBudget
from raypipe.config.document import Document
from raypipe.config.yaml_text import dump_yaml, load_yaml
from raypipe.errors import ConfigError, LostLeaseError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import Outcomes, Session
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.launcher import Launcher
from raypipe.graph.progress import Display, Durations
from raypipe.graph.runner import run_stages
from raypipe.graph.stored_results import Resumed, resume
from raypipe.graph.training_stage import check_trainings
from raypipe.hardware import Hardware
from raypipe.integrations import tracking
from raypipe.integrations.tracking import Trackers
from raypipe.launch import in_job
from raypipe.provenance import environment_row, git_commit, now
from raypipe.redaction import without_secrets
from raypipe.store.ledger import Ledger
from raypipe.store.lock import writing
from raypipe.store.run_directory import RunDirectory, cache_directory
from raypipe.store.run_status import StatusWriter, first_status
from raypipe.store.tables import better, read_arrow, single_tables
from raypipe.study.loop import StudyGraph

#: an entry of the ledger: whether tables and report show everything that is stored
_SHOWN = "shown"
#: the beginning of the names of entries with the resolved configurations of all commands
CONFIGURATION = "configuration/"
#: results that a baseline beats, of which the end of a run tells
_MOST_WARNINGS = 5


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit status, the run directory, and why it failed."""

    status: int
    run_dir: RunDirectory
    failure: str = ""


@dataclass(frozen=True)
class Work:
    """Work of a command: the graph of a configuration on this hardware, and its run directory."""

    configuration: Configuration
    graph: StudyGraph
    nodes: Sequence[Hardware]
    run_dir: RunDirectory

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self.configuration.experiment.name

    def resumed(self, ledger: Ledger, *, strict: bool) -> Resumed:
        """Return what is asked of the run directory. Raises ConfigError as :func:`resume`."""
        entries = {**run_entry(self.configuration), **self.graph.entries(ledger)}
        source = self.configuration.source()
        return resume(self.run_dir, ledger, entries, self.graph.known, source, strict=strict)


def execute(
    document: Document,
    overrides: Sequence[str],
    again: Callable[[RunDirectory], str],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    profile: str = "auto",
    only: Sequence[str] = (),
    address: str | None = None,
    time_budget: str | None = None,
    strict_code: bool = False,
    local: bool = False,
    at_end: Callable[[Configuration, Ledger], None] = lambda *_: None,
) -> Ended:
    """Run an experiment; return how it ended. Options are those of :func:`raypipe.run`.

    ``again`` returns the command that continues in a run directory; ``at_end`` reports on a run
    that succeeded.

    Raises:
        ConfigError: a mistake; nothing started, nothing written.

    """
    budget = TimeBudget(time_budget)
    faults.from_environment()
    if local and address is not None:
        raise ConfigError("--local runs without a cluster, and --address names one; give only one")
    cache_directory()  # report a wrong name before anything starts
    with ExitStack() as stack:
        launcher = None if local else cluster.attach(address, stack)
        nodes = cluster.hardware_of(launcher)
        configuration, note = matrix_or_sweep(resolve(document, overrides, profile, nodes), only)
        graph = selected(configuration, only, nodes)
        check_training(configuration, graph, nodes)
        if launcher is None and not local:  # a cluster may grow; this machine does not
            check_size(configuration, graph, nodes[0])
            cluster.check_address_space(nodes[0])
        work = Work(configuration, graph, nodes, _run_directory(run_dir, configuration))
        stored = Ledger(work.run_dir, writable=False)
        tracking.check(configuration.settings.tracking, work.run_dir)
        stages, complete, warning = work.resumed(stored, strict=strict_code)
        on_gpu = any(node.gpus for node in nodes)
        check_trainings(work.run_dir, stored, stages, configuration.origin, on_gpu=on_gpu)
        code = code_of(configuration, stages)

        print(f"run directory: {work.run_dir.shown}", flush=True)
        if stored.damage:
            print(f"WARNING: the ledger is damaged: {stored.damage}", flush=True)
        if warning:
            print(warning, flush=True)
        if complete and not stored.damage and _is_shown(work, stored, stages):
            print("nothing to do: everything this configuration asks for is stored", flush=True)
            at_end(configuration, stored)
            return Ended(0, work.run_dir)
        seen = stored.version
        del stored  # the writer reads it again, and it may be large
        check = stack.enter_context(writing(work.run_dir, lambda text: print(text, flush=True)))
        display = stack.enter_context(Display(live=not local))
        command = again(work.run_dir)
        status: StatusWriter | None = None
        failed, interrupted = "", ""
        try:
            stamp = {"command_id": secrets.token_hex(4)}
            ledger = Ledger(work.run_dir, before_writing=check, stamp=stamp)
            if ledger.version != seen:  # another command wrote in between
                stages = work.resumed(ledger, strict=strict_code).stages
            run_id = _record(work, ledger, code)
            begun = first_status(
                work.run_dir, work.name, run_id, command, configuration.profile, code.fingerprint
            )
            status = stack.enter_context(StatusWriter(work.run_dir, begun, display.snapshot, check))
            announce(display, configuration, nodes)
            _say_graph(display, work, note, local=local)
            if local:
                launcher = cluster.local()
            elif launcher is None:
                display.prepare(f"starting Ray on {nodes[0].cpus} CPUs")
                launcher = cluster.start(stack, code.source.modules)
            _record_environment(ledger, launcher, command, stamp["command_id"])
            settings = configuration.settings
            trackers = Trackers(
                settings.tracking, work.run_dir, run_id, work.name, configuration.resolved()
            )
            session = Session(
                work.run_dir,
                run_id,
                ledger,
                launcher,
                display,
                nodes,
                stack.enter_context(trackers),
                settings,
                declared(configuration.experiment),
                stamp["command_id"],
                code.fingerprint,
                None if local else Durations(nodes),
            )
            with budget.watched(launcher, display.say):
                failed = _run_graph(graph, session)
            _report(work, ledger, command, status, display)
        except KeyboardInterrupt:
            interrupted = "the time budget is over" if budget.is_over else "interrupted"
        except (OSError, LostLeaseError) as error:
            failed = f"the run directory cannot be written: {error}"
        except UnitError as error:
            failed = str(error)
        if interrupted:
            display.say(f"{interrupted}; finished units are kept. Continue with: {command}")
            if status is not None:
                with suppress(ConfigError, OSError):
                    status.key_result = results_of(work.run_dir).key_result
                status.end("interrupted", interrupted)
            return Ended(130, work.run_dir, interrupted)
        if failed or work.run_dir.list(work.run_dir.logs):
            display.say(f"logs: {shlex.join(['raypipe', 'logs', work.run_dir.shown])}")
        if failed:
            display.say(f"failed: {failed}\ncontinue with: {command}{after_edit(stages)}")
        else:
            at_end(configuration, ledger)
            shown = work.run_dir.shown
            display.say(f"done: {shown} (report: {shown}/report/index.html)")
        if status is not None:
            status.end("failed" if failed else "succeeded", failed)
        return Ended(int(bool(failed)), work.run_dir, failed)


def announce(display: Display, configuration: Configuration, nodes: Sequence[Hardware]) -> None:
    """Print the profile and the hardware that selected it, and enabled fault injection."""
    gpus = [gpu.name for node in nodes for gpu in node.gpus]
    if gpus:
        hardware = f"{len(gpus)} GPU(s): {gpus[0]}"
    else:
        note = next((node.gpu_note for node in nodes if node.gpu_note), "none found")
        hardware = f"no GPU ({note})"
    display.say(f"profile {configuration.profile}: {hardware}")
    for node in nodes:
        for problem in node.gpu_problems:
            display.say(f"WARNING: {node.hostname}: not used: {problem}")
    if files := import_path.shadowing():
        display.say(
            f"WARNING: {', '.join(files)}: has the name of a module of Python or of a package that "
            "raypipe needs, which every import gets instead; rename it"
        )
    if value := os.environ.get(faults.VARIABLE):
        display.say(f"WARNING: fault injection is enabled ({faults.VARIABLE}={value})")


def _run_directory(
    location: str | os.PathLike[str] | None, configuration: Configuration
) -> RunDirectory:
    if in_job():
        cluster.shared_location(location or os.environ.get(RUNS))
    if location is None:
        return RunDirectory.new(runs_location(), configuration.experiment.name)
    run_dir = RunDirectory.at(os.fspath(location))
    run_dir.check_new()
    return run_dir


def _is_shown(work: Work, ledger: Ledger, stages: Sequence[Stage]) -> bool:
    """Whether the tables and the report exist, written after the last unit was stored.

    A stage that failed in units that are not asked for any more is not shown as it is, nor is a
    damaged table, or one that now declares otherwise which values are better.
    """
    run_dir = work.run_dir
    rows = (ledger.get("stages", stage.key) for stage in stages)
    if any(row is not None and row["status"] != "succeeded" for row in rows):
        return False
    single = single_tables(ledger, declared(work.configuration.experiment))
    tables = [run_dir.partition(table.name, "data") for table in single]
    files = [run_dir.config, *tables, f"{run_dir.report}/index.html"]
    if ledger.get("runs", _SHOWN) != {"all": True} or not all(map(run_dir.exists, files)):
        return False
    wanted = {table.name: {c.name: c.better for c in table.columns if c.better} for table in single}
    try:
        text = run_dir.read(run_dir.config).decode(errors="replace")
        if not isinstance(load_yaml(text, f"{run_dir.shown}/config.yaml"), dict):
            return False
        return {name: better(read_arrow(run_dir, name).schema) for name in wanted} == wanted
    except ConfigError as error:  # the ledger has its rows
        print(f"WARNING: a damaged file is written again: {error}", flush=True)
        return False


def _record(work: Work, ledger: Ledger, code: ExperimentCode) -> str:
    """Record what this command runs; return the run's name in every row.

    The name is made once for a run directory.
    """
    run_dir, configuration = work.run_dir, work.configuration
    text = dump_yaml(without_secrets(configuration.resolved()))
    run_dir.write(run_dir.config, text.encode())
    entry = f"{CONFIGURATION}{sha256(text.encode()).hexdigest()[:16]}"
    ledger.put("runs", {_SHOWN: {"all": False}, entry: {"text": text}})
    code.record(ledger, run_dir)
    work.graph.record(ledger)
    stored = ledger.get("runs", "run")
    if stored is None:
        stored = {"experiment": work.name, "run_id": f"{work.name}-{secrets.token_hex(4)}"}
        ledger.put("runs", {"run": stored})
    return str(stored["run_id"])


def _record_environment(ledger: Ledger, launcher: Launcher, command: str, command_id: str) -> None:
    """Record hardware, packages and commit of this command: a row per node."""
    commit = git_commit()
    about = {
        "command": command,
        "started_at": now(),
        "git_commit": commit and commit.rstrip("+"),
        "git_dirty": commit and commit.endswith("+"),
    }
    rows = launcher.on_every_node(environment_row)
    ledger.put("environment", {f"{command_id}/{r['hostname']}": {**about, **r} for r in rows})


def _say_graph(display: Display, work: Work, note: str, *, local: bool) -> None:
    if work.graph.text:
        display.say(work.graph.text)
    if note:
        display.say(note)
    if local:
        display.say("local: one process without Ray, one task at a time; a crash ends the command")
        if left_out := left_out_locally(work.configuration, work.graph):
            display.say(f"local: not followed: {'; '.join(left_out)}")


def _run_graph(graph: StudyGraph, session: Session) -> str:
    """Run the stages; return why one failed, or nothing."""
    loop = graph.loop(session.ledger)
    first = loop.further(session.ledger, Outcomes(), session.display.say)
    try:
        grow = None if loop.is_over else loop.further
        return run_stages(first, session, grow, partial(loop.compare, session)) or ""
    except UnitError as error:  # a search without its metric; what there is, is shown
        return str(error)


def _report(
    work: Work, ledger: Ledger, command: str, status: StatusWriter, display: Display
) -> None:
    """Write the report, and say what came out: the result, what is not finite, lost comparisons."""
    experiment: Experiment = work.configuration.experiment
    if ledger.rows("stages"):
        from raypipe.report.page import build  # matplotlib is slow to import

        own = of_report(experiment)
        build(work.run_dir, work.name, experiment.report, command, None, own)
    ledger.put("runs", {_SHOWN: {"all": True}})
    results = results_of(work.run_dir)
    status.key_result = results.key_result
    if results.key_result is not None:
        display.say(f"result: {results.key_result.text}")
    lost = results.beaten
    for warning in (*results.not_finite, *lost[:_MOST_WARNINGS]):
        display.say(f"WARNING: {warning}")
    if len(lost) > _MOST_WARNINGS:
        display.say(f"WARNING: {len(lost) - _MOST_WARNINGS} more are in the report")
