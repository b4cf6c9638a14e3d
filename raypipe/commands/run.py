"""Work of a command: ``raypipe run``, ``map`` and ``sweep``, and the trials of ``raypipe fit``."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from raypipe import faults, import_path
from raypipe.commands import RUNS, cluster, runs_location, seconds_of
from raypipe.commands.configuration import declared, of_report, resolve, stored_document
from raypipe.commands.plan import Work, check_gpus, work_of
from raypipe.commands.results import results_of
from raypipe.config.document import Document
from raypipe.config.yaml_text import dump_yaml
from raypipe.errors import ConfigError, EndedElsewhereError, LostLeaseError, UnitError
from raypipe.graph import tracking
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import Outcomes, Session
from raypipe.graph.experiment import Stage
from raypipe.graph.launcher import Launcher
from raypipe.graph.progress import Display, Durations
from raypipe.graph.runner import GraphRunner
from raypipe.graph.source import SourceCode, keep_code, with_scripts
from raypipe.graph.tracking import Trackers
from raypipe.hardware import Hardware
from raypipe.launch import in_job
from raypipe.provenance import environment_row, git_commit, now
from raypipe.redaction import without_secrets
from raypipe.stats import finite_or_none
from raypipe.store import run_status
from raypipe.store.ledger import SHOWN, Ledger, Row
from raypipe.store.lock import writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import StatusWriter, first_status
from raypipe.store.tables import better, read_arrow, single_tables
from raypipe.study.loop import StudyGraph
from raypipe.study.sweep_settings import SWEEP

if TYPE_CHECKING:
    from raypipe.report.tables import Headline
    from raypipe.store.shared_ledger import SharedLedger, ShareOfRun

#: share of a time budget, and its least seconds, that are kept for the end of the work
_RESERVE, _LEAST_RESERVE_S = 0.05, 30.0
#: of these, the seconds after an end that was not orderly
_CUT_S = 8.0
_POLL_S = 0.25
#: points of which the end of a run tells
_MOST_POINTS = 5


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
    local: bool = False,
    shared: bool = False,
    report: bool = True,
    at_start: Callable[[RunDirectory], object] = lambda _: None,
    at_end: Callable[[Configuration, RunDirectory], None] = lambda *_: None,
    page: Callable[[RunDirectory], AbstractContextManager[None]] | None = None,
) -> tuple[RunDirectory, str, str]:
    """Run an experiment: resolve, refuse, place, run and tell. Options are as of `raypipe.run`.

    ``again`` returns the command that continues in a run directory; ``at_start`` writes more into
    the directory when nothing can be refused any more; ``at_end`` reports on a run that succeeded;
    ``page`` prints the link of a page of the run, and serves it while the run goes on.

    Returns:
        The run directory; ``succeeded``, ``failed`` or ``interrupted``; and why it did not succeed.

    Raises:
        ConfigError: a mistake; nothing started, nothing written.

    """
    budget = TimeBudget(time_budget)
    with _ended_by_sigterm(), ExitStack() as stack:
        # resolve
        launcher, nodes = cluster.place(stack, address, local=local)
        work = work_of(resolve(document, overrides, profile, nodes), only, nodes)
        place = _run_directory(run_dir, work)

        # refuse
        share = stack.enter_context(_share_of(work, run_dir, place)) if shared else None
        command = _Command(work, place, again(place), local=local, report=report)
        if command.check(may_grow=launcher is not None):
            at_start(place)
            print("nothing to do: everything this configuration asks for is stored", flush=True)
            at_end(work.configuration, place)
            return place, "succeeded", ""

        # place
        stamp = {"command_id": command.id}
        if share is None:
            check = stack.enter_context(writing(place, partial(print, flush=True)))
            ledger = Ledger(place, before_writing=check, stamp=stamp)
        else:
            ledger = command.shared = share.ledger(stamp)
            check = command.shared.check_status
        display = stack.enter_context(command.display)
        try:
            run_id, status = command.record(ledger, check)
            at_start(place)
            command.status = stack.enter_context(status)
            announce(display, work.configuration, nodes)
            if page is not None:
                stack.enter_context(page(place))
            launcher = command.launcher(launcher, stack)
            session = command.session(run_id, ledger, launcher, stack)

            # run
            with budget.watched(launcher, display.say):
                failed = _run_graph(work.graph, session)

            # tell
            status.result = _tell_results(work, session)
            if not failed:
                at_end(work.configuration, place)
            command.end("failed" if failed else "succeeded", failed)
            if ledger.count("stages"):  # after the last line: nobody waits for the page
                command.write_report()
            ledger.put("runs", {SHOWN: {"all": True}})
        except KeyboardInterrupt:
            command.end(
                "interrupted", "the time budget is over" if budget.is_over else "interrupted"
            )
        except (OSError, LostLeaseError) as error:
            command.end("failed", f"the run directory cannot be written: {error}")
        except UnitError as error:
            command.end("failed", str(error))
        except EndedElsewhereError:
            ended = run_status.read(place)
            command.end(*("succeeded", "") if ended is None else (ended.status, ended.message))
        command.send_end()
        return place, *command.outcome


def fit(
    document: Document,
    overrides: Sequence[str],
    profile: str,
    address: str | None,
    stage: str | None,
) -> list[Row]:
    """Return a row per training stage and precision: the largest micro-batch that fits."""
    from raypipe.study.largest_batch import fit_stage, fitting  # with all that a sweep needs

    with ExitStack() as stack:
        launcher, nodes = cluster.place(stack, address)
        configuration = resolve(document, overrides, profile, nodes)
        check_gpus(configuration, nodes, [s for s in configuration.stages() if s.training])
        makers = fitting(configuration, stage, nodes)
        folder = stack.enter_context(TemporaryDirectory(prefix="raypipe-fit-"))
        run_dir, name = RunDirectory.at(folder), configuration.experiment.name
        display = stack.enter_context(Display())
        announce(display, configuration, nodes)
        if launcher is None:
            display.prepare(f"starting Ray on {nodes[0].cpus} CPUs")
            launcher = cluster.start(stack, configuration.source().modules)
        trackers = stack.enter_context(Trackers((), run_dir, "fit", name, {}))
        session = Session(run_dir, "fit", Ledger(run_dir), launcher, display, nodes, trackers)
        return [row for maker in makers for row in fit_stage(maker, session)]


def announce(display: Display, configuration: Configuration, nodes: Sequence[Hardware]) -> None:
    """Print the profile and the hardware that selected it, and enabled fault injection."""
    gpus = [gpu.name for node in nodes for gpu in node.gpus]
    note = next((node.gpu_note for node in nodes if node.gpu_note), "none found")
    hardware = f"{len(gpus)} GPU(s): {gpus[0]}" if gpus else f"no GPU ({note})"
    display.say(f"profile {configuration.profile}: {hardware}")
    warnings = [f"{n.hostname}: not used: {problem}" for n in nodes for problem in n.gpu_problems]
    if files := import_path.shadowing():
        warnings.append(
            f"{', '.join(files)}: has the name of a module of Python or of a package that "
            "raypipe needs, which every import gets instead; rename it"
        )
    if value := os.environ.get(faults.VARIABLE):
        warnings.append(f"fault injection is enabled ({faults.VARIABLE}={value})")
    for warning in warnings:
        display.say(f"WARNING: {warning}")


def _run_directory(location: str | os.PathLike[str] | None, work: Work) -> RunDirectory:
    if in_job():
        cluster.check_shared(location or os.environ.get(RUNS))
    if location is None:
        return RunDirectory.new(runs_location(), work.name)
    run_dir = RunDirectory.at(os.fspath(location))
    run_dir.check_new()
    return run_dir


def _share_of(work: Work, given: str | os.PathLike[str] | None, place: RunDirectory) -> ShareOfRun:
    """Return the lock of a run that other commands share. Raises ConfigError."""
    work.check_shared(given)
    from raypipe.store.shared_ledger import ShareOfRun

    return ShareOfRun(place, partial(print, flush=True))


class _Command:
    """A command, from its checks to the message at its end.

    ``text`` continues it. It has a ``status`` once its run is recorded, and in the end an
    ``outcome``: how it ended, and why it did not succeed. ``shared`` is the ledger of a run that
    other commands share.

    Args:
        work: what is asked for.
        place: the run directory.
        text: the command that continues it.
        local: whether it runs in this process.
        report: whether the page is wanted.

    """

    _code: SourceCode

    def __init__(
        self, work: Work, place: RunDirectory, text: str, *, local: bool, report: bool
    ) -> None:
        self.work, self.place, self.text = work, place, text
        self._is_local, self._wants_report = local, report
        self.id, self._started = secrets.token_hex(4), time.monotonic()
        self.status: StatusWriter | None = None
        self.outcome = "", ""
        self.shared: SharedLedger | None = None
        self.display = Display(live=not local)
        self._recipient: Sequence[str] = ()
        #: the version of the ledger that it was compared with
        self._seen: tuple[Any, ...] = ()

    def check(self, *, may_grow: bool) -> bool:
        """Refuse what the hardware or the stored results rule out, and print the run directory.

        ``may_grow`` says that nodes may come, as in a cluster.

        Returns:
            Whether all that is asked for is stored and shown.

        Raises:
            ConfigError: it is refused.

        """
        work, place = self.work, self.place
        settings = work.configuration.settings
        work.check(may_grow=may_grow or self._is_local)
        stored = Ledger(place, writable=False)
        tracking.check(settings.tracking, place)
        stages, is_stored, warning = work.resumed(place, stored)
        if any(stage.training is not None for stage in stages):
            from raypipe.graph.training_stage import check_initial_weights

            check_initial_weights(place, stored, stages, work.configuration.origin)
        self._code = with_scripts(work.configuration.source(), stages)
        if settings.notify:
            from raypipe.commands import notify

            self._recipient = notify.recipient(settings.notify)
        damage = f"WARNING: the ledger is damaged: {stored.damage}" if stored.damage else ""
        for line in filter(None, (f"run directory: {place.shown}", damage, warning)):
            print(line, flush=True)
        self._seen = stored.version
        return is_stored and not damage and self._is_shown(stored, stages)

    def _is_shown(self, ledger: Ledger, stages: Sequence[Stage]) -> bool:
        """Whether the report and the tables exist, written after the last unit was stored.

        A stage that failed in units that are not asked for any more is not shown as it is, nor is a
        damaged table, or one that now declares otherwise which values are better.
        """
        rows = (ledger.get("stages", stage.key) for stage in stages)
        if any(row is not None and row["status"] != "succeeded" for row in rows):
            return False
        place = self.place
        tables = single_tables(ledger, declared(self.work.configuration.experiment))
        files = [place.config, *(place.partition(table.name, "data") for table in tables)]
        files += [f"{place.report}/index.html"] * self._wants_report
        if ledger.get("runs", SHOWN) != {"all": True} or not all(map(place.exists, files)):
            return False
        wanted = {t.name: {c.name: c.better for c in t.columns if c.better} for t in tables}
        try:
            stored_document(place)
            return {name: better(read_arrow(place, name).schema) for name in wanted} == wanted
        except ConfigError as error:  # the ledger has its rows
            print(f"WARNING: a damaged file is written again: {error}", flush=True)
            return False

    def record(self, ledger: Ledger, check: Callable[[], None]) -> tuple[str, StatusWriter]:
        """Record what the command runs; return the run's name and its status.

        The name, which every row has, is made once for a run directory.
        """
        work, place = self.work, self.place
        if ledger.version != self._seen:  # another command wrote in between
            work.resumed(place, ledger)
        text = dump_yaml(without_secrets(work.configuration.resolved()))
        with ledger.exclusively():
            place.write(place.config, text.encode())
            new = {"experiment": work.name, "run_id": f"{work.name}-{secrets.token_hex(4)}"}
            run = ledger.get("runs", "run") or new
            ledger.put("runs", {SHOWN: {"all": False}, "run": run})
            keep_code(self._code, ledger, place)
            work.graph.record(ledger)
            if not self._wants_report:  # an earlier one does not show what this command stores
                place.delete(place.report)
        about = self.text, work.configuration.profile, self._code.fingerprint
        begun = first_status(place, work.name, run["run_id"], *about)

        def snapshot() -> dict[str, Any]:
            jobs = 0 if self.shared is None else self.shared.members()
            return {**self.display.snapshot(), "jobs": jobs}

        return run["run_id"], StatusWriter(place, begun, snapshot, check)

    def launcher(self, running: Launcher | None, stack: ExitStack) -> Launcher:
        """Say what runs where; return the launcher: a running one, or a new one."""
        display, work = self.display, self.work
        for text in filter(None, (work.graph.text, work.note)):
            display.say(text)
        if self._is_local:
            display.say(
                "local: one process without Ray, one task at a time; a crash ends the command"
            )
            return cluster.local(stack)
        if running is not None:
            return running
        display.prepare(f"starting Ray on {work.nodes[0].cpus} CPUs")
        return cluster.start(stack, self._code.modules)

    def session(self, run_id: str, ledger: Ledger, launcher: Launcher, stack: ExitStack) -> Session:
        """Return the state that all stages share, with the hardware of the command recorded."""
        commit = git_commit()
        about: Row = {"command": self.text, "started_at": now()}
        if commit:
            about |= {"git_commit": commit.rstrip("+"), "git_dirty": commit.endswith("+")}
        rows = launcher.on_every_node(environment_row)
        ledger.put("environment", {f"{self.id}/{r['hostname']}": {**about, **r} for r in rows})
        place, work, configuration = self.place, self.work, self.work.configuration
        given = configuration.settings.tracking, place, run_id, work.name, configuration.resolved()
        trackers = stack.enter_context(Trackers(*given))
        return Session(
            *(place, run_id, ledger, launcher, self.display, work.nodes, trackers),
            settings=configuration.settings,
            tables=declared(configuration.experiment),
            command_id=self.id,
            code=self._code.fingerprint,
            durations=None if self._is_local else Durations(work.nodes),
            shared=self.shared,
        )

    def end(self, ended: str, why: str = "") -> None:
        """Say and store how the work ended, unless this is known."""
        if self.outcome == (ended, why):
            return
        if self.shared is not None:
            self.shared.leave()
        self.outcome = ended, why
        self._say_end(ended, why)
        if self.status is None:
            return
        if ended == "interrupted":  # it has the result so far
            # any error, since a second Ctrl-C may have left pandas half imported
            with suppress(Exception):
                self.status.result = results_of(self.place).result
        self.status.end(ended, why)

    def _say_end(self, ended: str, why: str) -> None:
        """Say how the work ended, and how to continue."""
        place, say = self.place, self.display.say
        if ended == "interrupted":
            say(f"{why}; finished units are kept. Continue with: {self.text}")
            return
        if ended == "failed" or place.list(place.logs):
            say(f"logs: {shlex.join(['raypipe', 'logs', place.shown])}")
        if ended == "failed":
            self.display.fail(f"failed: {why}")
            say(f"continue with: {self.text}")
            return
        page = f"report: {place.shown}/report/index.html"
        without = f"without a report; write it with: raypipe report {place.shown}"
        say(f"done: {place.shown} ({page if self._wants_report else without})")

    def write_report(self) -> None:
        """Write the page of the results, if it is wanted."""
        if not self._wants_report:
            return
        from raypipe.report.page import build  # matplotlib is slow to import

        experiment = self.work.configuration.experiment
        named = experiment.name, experiment.report, self.text
        build(self.place, *named, of_report(experiment))

    def send_end(self) -> None:
        """Send how the command ended to the recipient, if there is one."""
        if not self._recipient or (self.shared is not None and not self.shared.is_alone):
            return
        from raypipe.commands import notify

        end = {
            "run_dir": self.place.shown,
            "experiment": self.work.name,
            "status": self.outcome[0],
            "message": self.outcome[1],
            "result": "" if self.status is None else self.status.result,
            "duration_s": round(time.monotonic() - self._started, 1),
            "command": self.text,
        }
        notify.send(self._recipient, self.place, end, self.display.say)


def _run_graph(graph: StudyGraph, session: Session) -> str:
    """Run the stages; return why one failed, or nothing."""
    loop = graph.loop(session.ledger)
    first = loop.further(session.ledger, Outcomes(), session.display.say)
    try:
        grow = None if loop.is_over else loop.further
        return GraphRunner(session, grow).run(first, partial(loop.compare, session)) or ""
    except UnitError as error:  # a search without its metric; what there is, is shown
        return str(error)


def _tell_results(work: Work, session: Session) -> str:
    """Say what came out: the result, which it returns, what is not finite, lost comparisons."""
    say = session.display.say
    results = results_of(session.run_dir)
    if results.result:
        say(f"result: {results.result}")
        is_sweep = work.graph.only == (SWEEP,)  # whose end shows its points
        if len(results.bests[0].ranking) > 1 and not is_sweep:
            say(_leading(results.bests[0]))
    for warning in (*results.not_finite, *results.beaten):
        say(f"WARNING: {warning}")
    return results.result


def _leading(best: Headline) -> str:
    """Return the best points by a number as a table."""
    from raypipe.commands.table_view import terminal_width, view

    rows: list[Row] = [
        {"point": each.label, best.column.name: each.mean, "runs": each.runs}
        for each in best.ranking[:_MOST_POINTS]
    ]
    for row in rows if all(each.runs == 1 for each in best.ranking) else ():
        del row["runs"]
    if (rival := best.baseline) is not None:  # else a contender below it looks like the second best
        rows.append({"point": f"baseline {rival.label}", best.column.name: rival.mean})
    return view(rows, terminal_width(), whole=True)


def _points_table(rows: Sequence[Row], metric: str, mode: str) -> str:
    """Return the best points of a sweep as a table, and how many more there are."""
    from raypipe.commands.table_view import terminal_width, view
    from raypipe.report.results import medians
    from raypipe.study.space import shown

    sign = -1 if mode == "max" else 1
    lines = [
        {"point": shown(row.get("point") or {}), metric: number, "status": row["status"]}
        for row in medians(rows)
        for number in [finite_or_none(row.get(metric))]
    ]
    lines.sort(key=lambda line: math.inf if line[metric] is None else sign * line[metric])
    text = view(lines[:_MOST_POINTS], terminal_width(), whole=True)
    more = len(lines) - _MOST_POINTS
    return f"{text}\n... and {more} more in the table trials" if more > 0 else text


def print_recommendation(
    file: str | os.PathLike[str] | None, configuration: Configuration, run_dir: RunDirectory
) -> None:
    """Print the sweep's recommendation; write it as a configuration to a file, if one is given."""
    from raypipe.study.recommendation import snippet

    settings, ledger = configuration.settings.sweep, Ledger(run_dir, writable=False)
    row = ledger.get("recommendations", settings.stage)
    if row is None:
        print("nothing is recommended; the table trials has the outcome of each point", flush=True)
        return
    rows = [each for each in ledger.rows("trials") if each.get("trained_stage") == settings.stage]
    print(_points_table(rows, row["metric"], row["mode"]), flush=True)
    print(snippet(row["settings"], row["reason"]), flush=True)
    if file is not None:
        chosen = {**row["settings"], f"{settings.stage}.from_sweep": False, SWEEP: None}
        text = snippet(configuration.with_values(chosen, "the sweep").resolved(), row["reason"])
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {file}: cannot be written: {error}") from error


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, from Python as on the command line.

    It would end the process at once: a time budget and a lost lock end a command by it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class TimeBudget:
    """The time that a command may take, from now on; None for any.

    Raises:
        ConfigError: the text is not a time, or this is not the main thread, which alone it can end.

    """

    def __init__(self, text: str | None) -> None:
        if text is not None and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"time_budget = {text!r}: works in the main thread only; call the command there, "
                "or leave time_budget out"
            )
        seconds = math.inf if text is None else seconds_of(text)
        self._end = time.monotonic() + seconds
        self._reserve_s = max(_LEAST_RESERVE_S, _RESERVE * seconds)
        #: whether the command was ended since its time was over
        self.is_over = False

    @contextmanager
    def watched(self, launcher: Launcher, say: Callable[[str], None]) -> Iterator[None]:
        """Raise KeyboardInterrupt in the body's main thread when the time is nearly over.

        Before that, running trainings save checkpoints and end, and pools start no more tasks.
        """
        if self._end == math.inf:
            yield
            return
        done, lock = threading.Event(), threading.Lock()

        def watch() -> None:
            if done.wait(self._end - self._reserve_s - time.monotonic()):
                return
            self.is_over = True
            say("the time budget is nearly over: trainings save checkpoints, no task starts")
            launcher.wind_down()
            while not done.wait(_POLL_S):
                if launcher.is_at_rest or time.monotonic() >= self._end - _CUT_S:
                    break
            with lock:
                if not done.is_set():
                    # as the signal of a batch system; a flag would not end waits of the main thread
                    os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="time budget", daemon=True).start()
        try:
            yield
        finally:
            with lock:
                done.set()
