"""Stage context: the settings, units, launcher and ledger that a running stage works with."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from raypipe.config.settings import Settings
from raypipe.errors import UnitError
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import SettingsView
from raypipe.graph.launcher import Launcher, PoolOptions, TaskPool, TaskResult
from raypipe.graph.progress import Display, Durations
from raypipe.graph.stored_results import IDENTITIES, is_done, unfinished
from raypipe.graph.tables import CORE
from raypipe.graph.unit_logs import Failure, UnitLogs
from raypipe.provenance import now
from raypipe.store.ledger import CLAIMS, RESULTS, Ledger, Row, checksum
from raypipe.store.run_directory import RunDirectory, variant_name
from raypipe.store.tables import Table, by_name

if TYPE_CHECKING:
    from raypipe.graph.tracking import Trackers
    from raypipe.hardware import Hardware
    from raypipe.store.shared_ledger import SharedLedger
    from raypipe.training.job import TrainingJob

K = TypeVar("K")
#: maximum number of results buffered behind an earlier call before `map` draws no more calls
_MOST_BUFFERED = 1000


@dataclass(frozen=True)
class Session:
    """State that all stages of a command share.

    ``command_id`` refers to the command's rows in the table ``environment``; ``code`` is the
    fingerprint of the experiment's source. ``durations`` remembers what stages took.
    """

    run_dir: RunDirectory
    run_id: str
    ledger: Ledger
    launcher: Launcher
    display: Display
    nodes: Sequence[Hardware]
    trackers: Trackers
    settings: BaseModel = field(default_factory=Settings)
    tables: Mapping[str, Table] = field(default_factory=lambda: by_name(CORE))
    command_id: str = ""
    code: str = ""
    durations: Durations | None = None
    #: the ledger, if other commands share the run
    shared: SharedLedger | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other command writes the run at the same time."""
        return self.shared is None or self.shared.is_alone

    @property
    def gpus(self) -> list[str]:
        """The names of the GPUs of all nodes."""
        return [gpu.name for node in self.nodes for gpu in node.gpus]


@dataclass
class Outcomes:
    """The keys of the stages that have ended; units of a running stage may wait for others.

    ``failures`` says why stages failed or were skipped, the first one first, and
    ``is_interrupted`` whether the run is interrupted.
    """

    ended: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    def end(self, stage: str, failure: str | None) -> None:
        """Record that a stage has ended, and why it failed."""
        if failure is not None:  # before: a failed stage must never look as if it had succeeded
            self.failures[stage] = failure
        self.ended.add(stage)

    def failed(self, stages: Iterable[str]) -> list[str]:
        """Return the stages that failed or were skipped."""
        return [stage for stage in stages if stage in self.failures]


class StageContext:
    """The interface of a stage's ``run``: read settings, launch units, record results."""

    def __init__(
        self,
        stage: Stage,
        session: Session,
        beside: Callable[[], Sequence[Stage]] = tuple,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.stage = stage
        #: clock of its creation, when its stage starts
        self.created = time.monotonic()
        #: the unfinished stages that can run at the same time as this one
        self.beside = beside
        self.session = session
        self.device = "cpu"
        self.gpu_peak_bytes: int | None = None
        #: seconds of its tasks' processors, or of its training: whole, of CPUs, of GPUs
        self.cpu_s = 0.0
        self.leased: tuple[float, float, float] | None = None
        self.resumed = False
        #: the main number of its result in words, if it has one
        self.result = ""
        #: clock of the start of its first training or task, which may wait for resources
        self.began: float | None = None
        #: seconds in which its tasks waited for resources, or its units for other stages
        self.waited_s = 0.0
        self._outcomes = outcomes or Outcomes({*stage.needed_keys})
        self._offered: set[str] = set()
        self._ended = 0
        #: with other commands: the units that this one has claimed, and further ones that are not
        #: known to be settled
        self.claimed: Sequence[Unit] | None = None
        self._open: Sequence[Unit] | None = None
        #: what failed in another command, if anything
        self.elsewhere: str | None = None
        #: units of the stage that were not finished when ``todo`` was called last
        self.left = 0

    @cached_property
    def settings(self) -> SettingsView:
        """The settings that the stage reads (:class:`~raypipe.graph.experiment.Stage`)."""
        settings = self.stage.settings or self.session.settings
        return SettingsView(settings, self.stage.reads or (), self.stage.name)

    @cached_property
    def run_dir(self) -> RunDirectory:
        """The run directory, with the files of the stage's variant."""
        return self.stage.files(self.session.run_dir)

    @cached_property
    def ledger(self) -> Ledger:
        """The durable record, which results are written to: the rows that the stage sees."""
        return self.stage.seen(self.session.ledger)

    @cached_property
    def _units(self) -> Mapping[str, Unit]:
        return {unit.key: unit for unit in self.stage.units}

    def unfinished(self) -> Sequence[Unit]:
        """Return the units that are not finished, in order."""
        if self.claimed is not None:
            return [unit for unit in self.claimed if not is_done(self.ledger, unit)]
        return unfinished(self.stage, self.ledger)

    def todo(self) -> Sequence[Unit]:
        """Return the units to compute: not finished, and their needs are done; in order.

        If units need different stages, there are more of them when those have ended. The framework
        then calls ``run`` again, unless it takes them from ``further_units`` earlier.
        """
        self._ended = len(self._outcomes.ended)  # before the units: stages end meanwhile
        units = self.unfinished()
        self.left = len(units) + len(self._open or ())
        if not self.stage.needs:
            return units
        ready = [unit for unit in units if self._is_ready(unit)]
        self._offered.update(unit.key for unit in ready)
        return ready

    def _is_ready(self, unit: Unit) -> bool:
        """Whether what a unit needs is done."""
        needs = self.stage.unit_needs.get(unit.key, frozenset())
        return needs <= self._outcomes.ended and not self._outcomes.failed(needs)

    def claim(self, ledger: SharedLedger, most: int) -> None:
        """Claim units of a run that other commands share, which are then all that are unfinished.

        There are at most ``most``, and no more than this command's share of those that are left.
        The caller keeps other commands from writing the ledger.
        """
        claimed, held = list[Unit](), list[Unit]()
        left = unfinished(self.stage, self.ledger) if self._open is None else self._open
        most, units = min(most, math.ceil(len(left) / ledger.members())), iter(left)
        while len(claimed) < most and (unit := next(units, None)) is not None:
            if is_done(self.ledger, unit):
                continue
            key = self._name_of(unit)
            claim = ledger.claim_on(key)
            if claim is not None and claim["failed"]:
                self.elsewhere = f"{key}: failed in another job of this run"
            elif claim is None and self._is_ready(unit):
                claimed.append(unit)
            else:
                held.append(unit)
        ledger.claim(map(self._name_of, claimed))
        self.claimed, self._open = claimed, [*held, *units]

    def count(self, ledger: SharedLedger) -> tuple[int, int]:
        """Return how many units are stored, by whichever command, and how many there are.

        Commands claim units in order, so it stops at the first one that nobody has claimed.
        """
        total = len(self.stage.units)
        with ledger.exclusively():
            left = len(self.claimed or ()) + len(self._open or ())
            for unit in itertools.chain(self.claimed or (), self._open or ()):
                if is_done(self.ledger, unit):
                    left -= 1
                elif ledger.claim_on(self._name_of(unit)) is None:
                    break
        return total - left, total

    def settle(self, ledger: SharedLedger, *, is_lost: bool = False) -> None:
        """Record for other commands which of the claimed units have failed here.

        If what this command computes is lost, others may claim them.
        """
        names = [self._name_of(unit) for unit in self.unfinished()]
        if is_lost or self._outcomes.is_interrupted:
            ledger.remove(CLAIMS, names)
        else:
            ledger.claim(names, failed=True)

    @property
    def is_settled(self) -> bool:
        """Whether all units are stored or have failed, or what they need has, here or elsewhere."""
        failed, needs = self._outcomes.failed, self.stage.unit_needs
        return all(failed(needs.get(unit.key, ())) for unit in self._open or ())

    def _name_of(self, unit: Unit) -> str:
        return variant_name(unit.key, self.stage.variant)

    def further_units(self) -> list[Unit]:
        """Return units to compute that neither this nor ``todo`` has returned; fast if none."""
        if not self.stage.needs or not self.has_news:
            return []
        before = set(self._offered)
        return [unit for unit in self.todo() if unit.key not in before]

    @property
    def has_news(self) -> bool:
        """Whether stages have ended since it last looked for units to compute."""
        return len(self._outcomes.ended) > self._ended

    def waits(self) -> bool:
        """Whether further units can be computed once stages that run now have ended."""
        ended, failed = self._outcomes.ended, self._outcomes.failed
        needs = (self.stage.unit_needs[unit.key] for unit in self.unfinished())
        return any(not each <= ended and not failed(each) for each in needs)

    def failed_needs(self) -> list[str]:
        """Return the stages that unfinished units need and that failed."""
        units = self.unfinished() if self.stage.needs else ()
        needs = {need for unit in units for need in self.stage.unit_needs[unit.key]}
        return sorted(self._outcomes.failed(needs))

    def finish(self, unit: Unit | str, rows: Mapping[str, Mapping[str, Row]] | None = None) -> None:
        """Record that a unit is finished, durably together with its rows.

        A stage with one unit need not call it: the framework does when ``run`` returns.

        Args:
            unit: a unit of the stage, or its key.
            rows: the unit's rows, by table and row key, written in the same disk sync. Rows that
                were put before need not be repeated.

        """
        if isinstance(unit, str):
            unit = self._units[unit]
        self.finish_all([self._units.get(unit.key, unit)], rows or {})

    def finish_all(
        self, units: Sequence[Unit], rows: Mapping[str, Mapping[str, Row]], *, whole: bool = False
    ) -> None:
        """Record that units are finished, durably together with rows, all or nothing.

        ``whole`` says that the rows, under the keys of the units, are all of their results: if the
        ledger is damaged later, the units are kept whose rows are intact.
        """
        recorded = self.records(units, "succeeded")
        for key, row in recorded["units"].items() if whole else ():
            row[RESULTS] = {table: checksum(of_table[key]) for table, of_table in rows.items()}
        self.ledger.put_tables({**rows, **recorded})

    def records(self, units: Iterable[Unit], status: str) -> dict[str, dict[str, Row]]:
        """Return the records of units in the ledger's tables, and of the identities that are new.

        Raises:
            ValueError: a unit without an identity.

        """
        rows, shared, at = dict[str, Row](), dict[str, Mapping[str, Any]](), now()
        for unit in units:
            row: Row = {
                **unit.composed.record(),
                "status": status,
                "budget": unit.budget,
                "extensible": unit.extensible,
                "stage": self.stage.name,
                "code": self.session.code,
                "finished_at": at,
            }
            if unit.extents:
                row["extents"] = dict(unit.extents)
            rows[unit.key] = row
            shared[row["shared"]] = unit.composed.shared
        new = (key for key in shared if self.ledger.get(IDENTITIES, key) is None)
        return {"units": rows, IDENTITIES: {key: dict(shared[key]) for key in new}}

    def fail(self, failure: Failure) -> None:
        """Record a failed attempt, write its log, and show it unless others like it were shown."""
        row = {**failure.row(), "stage": self.stage.name, "log": self.logs.file(failure.unit)}
        key = f"{self.stage.name}/{failure.unit}/{self.ledger.count('failures')}"
        self.ledger.put("failures", {key: row})
        self.logs.failed(failure)

    @cached_property
    def logs(self) -> UnitLogs:
        """The logs of the stage's units, which show failures to the user."""
        return UnitLogs(self.run_dir, self.stage.name, self.session.display.fail)

    def say(self, text: str) -> None:
        """Show a line to the user."""
        self.session.display.say(text, self.stage.key)

    def advance(self, done: int, note: str = "") -> None:
        """Show the stage's progress, in the unit of ``begin``."""
        self.session.display.advance(self.stage.key, done, note)

    def begin(self, total: int, done: int = 0) -> None:
        """Show the stage's total, and how much of it is done."""
        if self.claimed is not None and self.began is not None:  # a later round
            self.advance(done)
        else:
            self.session.display.begin(self.stage.key, total, done)

    def pool(self, options: PoolOptions) -> AbstractContextManager[TaskPool]:
        """Open a pool of fractional-CPU tasks; receive their results with ``finished``."""
        if options.gpus and self.session.gpus:
            self.device = self.session.gpus[0]
        return self.session.launcher.pool(options, self.say)

    def finished(self, pool: TaskPool) -> list[TaskResult]:
        """Wait for at least one task, and return all that ended for good since the last call.

        Empty if none is left. Every failed attempt becomes a row in ``failures``.
        """
        start = time.monotonic()
        while results := pool.finished():
            end = time.monotonic()
            # what is left of the wait, apart from the process that worked longest
            busy = defaultdict[str, float](float)
            for result in results:
                busy[result.worker] += result.duration_s
            self.waited_s += max(0.0, end - start - max(busy.values()))
            if self.began is None:
                self.began = self.created + self.waited_s
            start = end
            for result in results:
                self.cpu_s += result.cpu_s
                if result.error is not None:
                    outcome = "again" if result.retried else "gave up"
                    about = result.error, outcome, result.trace, result.output
                    self.fail(Failure(result.key, result.attempt, result.kind or "error", *about))
                elif result.output:
                    self.logs.printed(result.key, result.attempt, result.output)
            if final := [result for result in results if not result.retried]:
                return final
        return []

    def map(
        self, pool: TaskPool, calls: Iterable[tuple[K, *tuple[Any, ...]]]
    ) -> Iterator[tuple[K, Any]]:
        """Run calls as tasks; yield each call's key with its value, in the order of the calls.

        Calls are drawn from the iterable as the pool has room, so there may be very many. If a call
        fails, the others still run.

        Args:
            pool: the task pool.
            calls: tuples of a key, a function and its arguments. The key is an object with a unique
                text (``str``), and is returned unchanged.

        Raises:
            UnitError: a call failed for good; raised after all others have run.

        """
        broken: TaskResult | None = None
        keys: deque[K] = deque()
        ended: dict[str, TaskResult] = {}

        def noted() -> Iterator[tuple[K, *tuple[Any, ...]]]:
            for call in calls:
                keys.append(call[0])
                yield call

        for results in self.outcomes(pool, noted(), lambda: len(ended) < _MOST_BUFFERED):
            ended.update({result.key: result for result in results})
            while keys and str(keys[0]) in ended:
                key = keys.popleft()
                result = ended.pop(str(key))
                if result.error is None:
                    yield key, result.value
                else:
                    broken = broken or result
        if broken is not None:
            kind, message = broken.kind or "error", broken.error or ""
            raise UnitError(broken.key, kind, message, trace=broken.trace)

    def outcomes(
        self,
        pool: TaskPool,
        calls: Iterable[tuple[K, *tuple[Any, ...]]],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[list[TaskResult]]:
        """Run calls as tasks; yield the final results of those that ended, failures included.

        Calls are as in ``map``. They are drawn as the pool has room and ``is_ready`` returns true,
        or if none is running.
        """
        waiting, running = iter(calls), 0
        while True:
            # always keep one task queued; otherwise `finished()` would return immediately
            while (pool.has_room and is_ready()) or not running:
                if (call := next(waiting, None)) is None:
                    break
                key, function, *arguments = call
                pool.submit(str(key), function, *arguments)
                running += 1
            if not (results := self.finished(pool)):
                break
            running -= len(results)
            yield results

    def call(
        self, name: str, function: Callable[..., Any], *arguments: Any, on_gpu: bool = False
    ) -> Any:
        """Run a function in one task and return its value; ``on_gpu`` uses a GPU if there is one.

        Raises:
            UnitError: the last attempt failed.

        """
        gpus = float(on_gpu and bool(self.session.gpus))
        with self.pool(PoolOptions(gpus=gpus)) as pool:
            return next(value for _, value in self.map(pool, [(name, function, *arguments)]))

    def record_trial(self, job: TrainingJob, status: str, outcome: Mapping[str, Any]) -> None:
        """Record the trial's row, as its last attempt left it."""
        row = job.row(self.stage.name, status, self.device, outcome)
        self.ledger.put("trials", {job.trial_id: row})
        self.session.trackers.end(job.trial_id, row)
