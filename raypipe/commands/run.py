"""``raypipe run`` and ``raypipe sweep``: run an experiment, or continue it."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from raypipe import faults
from raypipe.commands import cluster
from raypipe.commands.code import after_edit, code_of
from raypipe.commands.configuration import read, resolve
from raypipe.commands.declarations import about, declared, of_report
from raypipe.commands.recommendation import print_recommendation
from raypipe.commands.request import RUNS, Request, shared_location
from raypipe.commands.selection import (
    check_size,
    check_training,
    left_out_locally,
    matrix_or_sweep,
    run_entry,
    selected,
)
from raypipe.commands.time_budget import TimeBudget
from raypipe.config import search_path
from raypipe.config.yaml_text import dump_yaml, load_yaml
from raypipe.errors import ConfigError, LostLeaseError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.continuation import Resumed, resume
from raypipe.graph.durations import Durations
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.launcher import Launcher
from raypipe.graph.progress import Display
from raypipe.graph.runner import run_stages
from raypipe.graph.scheduler import Outcomes
from raypipe.graph.session import Session
from raypipe.graph.stages import check_trainings
from raypipe.hardware import Hardware
from raypipe.integrations import tracking
from raypipe.integrations.tracking import Trackers
from raypipe.launch import in_job
from raypipe.provenance import environment_row, git_commit, now
from raypipe.redaction import without_secrets
from raypipe.store.ledger import Ledger, Row
from raypipe.store.lock import writing
from raypipe.store.run_directory import RunDirectory, cache_directory
from raypipe.store.run_status import KeyResult, StatusWriter, first_status
from raypipe.store.tables import measures, single_tables
from raypipe.study.sweep_stage import NAME as SWEEP

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


def run(request: Request) -> int:
    """Run an experiment; return 0 when all is done, 1 if a stage failed, 130 if interrupted."""
    return execute(request).status


def execute(request: Request) -> Ended:
    """Run an experiment; return how it ended.

    Raises:
        ConfigError: a mistake; nothing started, nothing written.

    """
    budget = TimeBudget(request.time_budget)
    document = request.document or read(request.path)
    faults.from_environment()
    if request.local and request.address is not None:
        raise ConfigError("--local runs without a cluster, and --address names one; give only one")
    cache_directory()  # report a wrong name before anything starts
    with ExitStack() as stack:
        launcher = None if request.local else cluster.attach(request.address, stack)
        nodes = cluster.hardware_of(launcher)
        configuration = resolve(document, request.overrides, request.profile, nodes)
        configuration, left_out = matrix_or_sweep(configuration, request.only)
        graph = selected(configuration, request.only, nodes, confirmed=request.yes)
        check_training(configuration, graph, nodes)
        if launcher is None and not request.local:  # a cluster may grow; this machine does not
            check_size(configuration, graph, nodes[0])
            cluster.check_address_space(nodes[0])
        run_dir = _run_directory(request.run_dir, configuration)
        fresh = not run_dir.exists(run_dir.ledger)
        stored = Ledger(run_dir, writable=False)
        tracking.check(configuration.settings.tracking, run_dir)

        def resumed(ledger: Ledger) -> Resumed:
            entries = {**run_entry(configuration), **graph.entries(ledger)}
            source, strict = configuration.source(), request.strict_code
            return resume(run_dir, ledger, entries, graph.known, source, strict=strict)

        stages, is_whole, warning = resumed(stored)
        on_gpu = any(node.gpus for node in nodes)
        check_trainings(run_dir, stored, stages, configuration.origin, on_gpu=on_gpu)
        code = code_of(configuration, stages)
        print(f"run directory: {run_dir.shown}", flush=True)
        if stored.damage:
            print(f"WARNING: the ledger is damaged: {stored.damage}", flush=True)
        if warning:
            print(warning, flush=True)
        is_stored = not fresh and is_whole and not stored.damage
        if is_stored and _is_shown(run_dir, stored, configuration, stages):
            print("nothing to do: everything this configuration asks for is stored", flush=True)
            print_recommendation(request, configuration, stored)
            return Ended(0, run_dir)
        seen = stored.version
        del stored  # the writer reads it again, and it may be large
        check = stack.enter_context(writing(run_dir, lambda text: print(text, flush=True)))
        display = stack.enter_context(Display(live=not request.local))
        again = request.again(run_dir)
        command_id = secrets.token_hex(4)
        status: StatusWriter | None = None
        printed = False
        try:
            ledger = Ledger(run_dir, before_writing=check, stamp={"command_id": command_id})
            if ledger.version != seen:  # another command wrote in between
                stages = resumed(ledger).stages
            text = dump_yaml(without_secrets(configuration.resolved()))
            run_dir.write(run_dir.config, text.encode())
            ledger.put("runs", {_SHOWN: {"all": False}, **configuration_row(text)})
            code.record(ledger, run_dir)
            graph.record(ledger)
            run_id, name = _run_id(ledger, configuration), configuration.experiment.name
            begun = first_status(
                run_dir, name, run_id, again, configuration.profile, code.fingerprint
            )
            status = stack.enter_context(StatusWriter(run_dir, begun, display.snapshot, check))
            announce(display, configuration, nodes)
            if graph.text:
                display.say(graph.text)
            if left_out:
                display.say(left_out)
            if request.local:
                display.say(_local_text(left_out_locally(configuration, graph)))
                launcher = cluster.local()
            elif launcher is None:
                display.prepare(f"starting Ray on {nodes[0].cpus} CPUs")
                modules = code.source.modules if request.keep_cluster else None
                launcher = cluster.start(stack, modules)
            _record_environment(ledger, launcher, again, command_id)
            trackers = stack.enter_context(
                Trackers(
                    configuration.settings.tracking,
                    run_dir,
                    run_id,
                    name,
                    configuration.resolved(),
                )
            )
            session = Session(
                run_dir,
                run_id,
                ledger,
                launcher,
                display,
                nodes,
                trackers,
                configuration.settings,
                declared(configuration.experiment),
                command_id,
                code.fingerprint,
                None if request.local else Durations(nodes),
            )
            with budget.watched(launcher, display.say):
                loop = graph.loop(ledger)
                first = loop.further(ledger, Outcomes(), display.say)
                try:
                    failed = run_stages(first, session, None if loop.is_over else loop.further)
                except UnitError as error:  # a search without its metric; what there is, is shown
                    failed = str(error)
            if ledger.rows("stages"):
                from raypipe.report.page import build  # matplotlib is slow to import

                experiment = configuration.experiment
                build(run_dir, name, experiment.report, again, None, of_report(experiment))
            ledger.put("runs", {_SHOWN: {"all": True}})
            status.key_result, warnings = _result(run_dir, configuration.experiment)
            if status.key_result is not None:
                display.say(f"result: {status.key_result.text}")
            for warning in warnings:
                display.say(f"WARNING: {warning}")
            printed = bool(run_dir.list(run_dir.logs))
        except KeyboardInterrupt:
            why = "the time budget is over" if budget.is_over else "interrupted"
            display.say(f"{why}; finished units are kept. Continue with: {again}")
            if status is not None:
                with suppress(ConfigError, OSError):
                    status.key_result = about(run_dir).key_result
                status.end("interrupted", why)
            return Ended(130, run_dir, why)
        except (OSError, LostLeaseError) as error:
            failed = f"the run directory cannot be written: {error}"
        except UnitError as error:
            failed = str(error)
        if failed or printed:
            display.say(f"logs: {shlex.join(['raypipe', 'logs', run_dir.shown])}")
        if failed:
            follow = f"{again}{after_edit(stages)}"
            display.say(f"failed: {failed}\ncontinue with: {follow}")
        else:
            print_recommendation(request, configuration, ledger)
            display.say(f"done: {run_dir.shown} (report: {run_dir.shown}/report/index.html)")
        if status is not None:
            status.end("failed" if failed else "succeeded", failed or "")
        return Ended(int(bool(failed)), run_dir, failed or "")


def configuration_row(text: str) -> dict[str, Row]:
    """Return the ledger's entry of a resolved configuration, by which units can be replayed."""
    return {f"{CONFIGURATION}{sha256(text.encode()).hexdigest()[:16]}": {"text": text}}


def _result(run_dir: RunDirectory, experiment: Experiment) -> tuple[KeyResult | None, list[str]]:
    """Return the result of a run, and warnings about it.

    The warnings name numbers that are not finite, and results that a baseline of the run beats.
    """
    found = about(run_dir, experiment)
    lost = found.beaten
    rest = len(lost) - _MOST_WARNINGS
    more = [f"{rest} more are in the report"] if rest > 0 else []
    return found.key_result, [*found.not_finite, *lost[:_MOST_WARNINGS], *more]


def _local_text(left_out: Sequence[str]) -> str:
    text = "local: one process without Ray, one task at a time; a crash ends the command"
    return f"{text}\nlocal: not followed: {'; '.join(left_out)}" if left_out else text


def _run_directory(location: str | None, configuration: Configuration) -> RunDirectory:
    runs = os.environ.get(RUNS)
    if in_job():
        shared_location(location or runs)
    if location is None:
        return RunDirectory.new(runs or "runs", configuration.experiment.name)
    run_dir = RunDirectory.at(location)
    run_dir.check_new()
    return run_dir


def _is_shown(
    run_dir: RunDirectory, ledger: Ledger, configuration: Configuration, stages: Sequence[Stage]
) -> bool:
    """Whether the tables and the report exist, written after the last unit was stored.

    A stage that failed in units that are not asked for any more is not shown as it is, nor is a
    damaged table, or one that now declares otherwise which values are better.
    """
    rows = (ledger.get("stages", stage.key) for stage in stages)
    if any(row is not None and row["status"] != "succeeded" for row in rows):
        return False
    single = single_tables(ledger, declared(configuration.experiment))
    tables = [run_dir.partition(table.name, "data") for table in single]
    files = [run_dir.config, *tables, f"{run_dir.report}/index.html"]
    if ledger.get("runs", _SHOWN) != {"all": True} or not all(map(run_dir.exists, files)):
        return False
    better = {table.name: {c.name: c.better for c in table.columns if c.better} for table in single}
    try:
        text = run_dir.read(run_dir.config).decode(errors="replace")
        if not isinstance(load_yaml(text, f"{run_dir.shown}/config.yaml"), dict):
            return False
        stored = {name: measures(run_dir, name) for name in better}
    except ConfigError as error:  # the ledger has its rows
        print(f"WARNING: a damaged file is written again: {error}", flush=True)
        return False
    return stored == better


def _run_id(ledger: Ledger, configuration: Configuration) -> str:
    """Return the run's name in every row, generated once for a run directory."""
    stored = ledger.get("runs", "run")
    if stored is None:
        name = configuration.experiment.name
        stored = {"experiment": name, "run_id": f"{name}-{os.urandom(4).hex()}"}
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


def announce(display: Display, configuration: Configuration, nodes: Sequence[Hardware]) -> None:
    """Print the profile and the hardware that selected it, and enabled fault injection."""
    gpus = [gpu.name for node in nodes for gpu in node.gpus]
    if gpus:
        found = f"{len(gpus)} GPU(s): {gpus[0]}"
    else:
        note = next((node.gpu_note for node in nodes if node.gpu_note), "none found")
        found = f"no GPU ({note})"
    display.say(f"profile {configuration.profile}: {found}")
    for node in nodes:
        for problem in node.gpu_problems:
            display.say(f"WARNING: {node.hostname}: not used: {problem}")
    if files := search_path.shadowing():
        display.say(
            f"WARNING: {', '.join(files)}: has the name of a module of Python or of a package that "
            "raypipe needs, which every import gets instead; rename it"
        )
    if value := os.environ.get(faults.VARIABLE):
        display.say(f"WARNING: fault injection is enabled ({faults.VARIABLE}={value})")


def sweep(request: Request) -> int:
    """Run the sweep, print what it recommends, and write it if ``--write`` asks for it.

    Raises:
        ConfigError: ``--write`` names a file that exists.

    """
    if request.write is not None and Path(request.write).exists():
        raise ConfigError(f"--write {request.write}: exists already; choose another name")
    return run(replace(request, only=[SWEEP]))
