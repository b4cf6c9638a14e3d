"""Run the stages of a configuration: skip what is stored, launch the rest, record outcomes.

Every stage starts as soon as the stages that it needs have ended; one whose units need different
stages, when the first of them can be computed, and again when others can. Of those that can start,
the one with the longest remaining path comes first; what they submit waits in Ray's queue for its
resources. A stage that measures speed starts when no other one runs, and no other one starts while
it runs.
"""

from __future__ import annotations

import threading
import time
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING

from raypipe.errors import UnitError, message_of, trace_of
from raypipe.graph.context import Outcomes, Session, StageContext
from raypipe.graph.experiment import Stage, Unit, in_order
from raypipe.graph.progress import Estimate
from raypipe.graph.stored_results import BEGUN, all_stored, is_outdated, unfinished
from raypipe.graph.unit_logs import Failure, brief
from raypipe.provenance import ago, now
from raypipe.store import tables
from raypipe.store.ledger import Ledger, Row

if TYPE_CHECKING:
    from raypipe.store.shared_ledger import SharedLedger

#: seconds for the end of running stages; a training group takes up to 20 s to clean up
_END_S = 30.0
# Ray's libraries resume waits after a signal; Python handles it when this wait times out
_POLL_S = 0.5
#: threads; stages beyond them start when others end
_MOST_STAGES = 64
#: how much faster more units at a time must be, to be claimed at a time
_FASTER = 1.2
#: time between two writings of the tables, in units of the time that one takes
_SHARE = 20

#: further stages of a graph from the stored rows and the outcomes so far; reports lines to show
Grow = Callable[[Ledger, Outcomes, Callable[[str], None]], Sequence[Stage]]

#: how a stage ended: its status, and why it failed
_End = tuple[str, str | None]


class _Computation:
    """The units of a stage while they are computed: in rounds if some wait for other stages.

    Between two rounds it is paused, and takes no thread.

    Its ``units`` were not finished at the start. Those that have ``begun`` have no stored result
    that could be continued, and those that are ``outdated`` have one that is out of date.

    Attributes:
        is_shown: whether its stage is shown as running, and recorded at the end.

    """

    is_shown = True

    def __init__(self, context: StageContext) -> None:
        self.context, self.units = context, context.unfinished()
        self.begun, self.outdated = list[Unit](), list[Unit]()
        self._paused_at: float | None = None
        for unit in self.units if context.stage.needs or context.ledger.count("units") else ():
            stored = context.ledger.get("units", unit.key)
            if stored is not None and is_outdated(stored, unit):
                self.outdated.append(unit)
            # if what they need goes on before they are finished, their parts are out of date
            if unit.extents and (stored is None or is_outdated(stored, unit)):
                self.begun.append(unit)

    def run(self) -> bool:
        """Compute all units whose needs are done; return False if others wait for stages."""
        context, stage = self.context, self.context.stage
        if self._paused_at is None:
            self.run_first()
        else:
            context.waited_s += time.monotonic() - self._paused_at
        while stage.needs:
            if context.further_units():
                stage.run(context)
            elif context.waits():
                self._paused_at = time.monotonic()
                return False
            elif not context.has_news:
                break
        return True

    def run_first(self) -> None:
        """Compute the units whose needs are done now."""
        context, stage = self.context, self.context.stage
        if self.outdated and not stage.always_rerun:
            context.say("computed again: what it needs has gone on")
            if stage.forget is not None:
                stage.forget(context, self.outdated)
        if self.begun:
            context.ledger.put_tables(context.records(self.begun, BEGUN))
        if stage.needs:  # further units are those that it does not return
            context.todo()
        stage.run(context)
        if len(stage.units) == 1 and (stage.always_rerun or context.unfinished()):
            context.finish(stage.units[0].key)


class _Turns(_Computation):
    """The units of a stage that other commands compute, too: in rounds of units to claim.

    ``shared`` is the ledger, with the claims, and ``computing`` has the stages of which this
    command computes units now.
    """

    is_shown = False

    def __init__(
        self, context: StageContext, shared: SharedLedger, computing: dict[str, StageContext]
    ) -> None:
        self.context, self._shared, self._computing = context, shared, computing
        self.units, self.outdated = (), []
        self._failure: UnitError | None = None
        #: whether this command has lost its cluster; the others can still compute the units
        self._is_lost = False
        #: how many units to claim at a time, once that is known, and the most per second
        self._pace: int | None = None
        self._fastest = 0.0

    def run(self) -> bool:
        """Compute what it can claim, until all is settled; return False if others hold units."""
        context = self.context
        while self._claim():
            if not self.is_shown:
                self.is_shown, context.created = True, time.monotonic()
                _show(context)
                if len(context.stage.units) > 1:  # else it shows the steps of one
                    count = partial(context.count, self._shared)
                    context.session.display.counts[context.stage.key] = count
            self._compute_claimed()
        if not (self._is_lost or context.is_settled):
            time.sleep(_POLL_S)  # since the runner starts it again at once
            return False
        if not self.is_shown:
            context.session.display.say(f"{context.stage.key}: computed by other jobs")
        context.claimed = None
        context.session.display.counts.pop(context.stage.key, None)
        if self._failure is not None:
            raise self._failure
        return True

    def _claim(self) -> bool:
        """Claim units, if this command has room for them."""
        context, stage, session = self.context, self.context.stage, self.context.session
        with self._shared.exclusively():
            gpus = session.gpus if stage.on_gpu else []
            most = len(gpus) or sum(node.cpus for node in session.nodes)
            others = list(self._computing.values())
            waits = stage.training is not None and any(
                each.stage.training is not None and each.began is None for each in others
            )
            has_room = not (waits or self._is_lost) and len(others) < most
            context.claim(self._shared, (self._pace or most) if has_room else 0)
            if context.claimed:
                self._computing[stage.key] = context
        return bool(context.claimed)

    def _compute_claimed(self) -> None:
        context, part = self.context, _Computation(self.context)
        self.units, self.outdated = part.units, [*self.outdated, *part.outdated]
        start = time.monotonic()
        try:
            part.run_first()
        except UnitError as error:
            self._is_lost = error.kind == "node_lost"
            self._failure = self._failure or error
        except Exception:
            context.settle(self._shared)
            raise
        finally:
            del self._computing[context.stage.key]
        context.settle(self._shared, is_lost=self._is_lost)
        rate = len(part.units) / (time.monotonic() - start)
        if rate > _FASTER * self._fastest:  # of more at a time, fewer wait for the last one
            self._pace, self._fastest = 2 * len(part.units), rate


def _show(context: StageContext) -> None:
    stage, waits = context.stage, context.stage.training is not None
    note = "waiting for resources" if waits else stage.workload
    context.session.display.start(stage.key, note, waits=waits)


class GraphRunner:
    """The graph of a command while it runs.

    Stages run concurrently if the launcher allows it, otherwise in sequence, in this thread.

    Args:
        session: the state that all stages share.
        grow: returns further stages, which may need earlier ones: at the start, and whenever one
            has ended.

    """

    def __init__(self, session: Session, grow: Grow | None = None) -> None:
        self._session, self._grow = session, grow
        self._outcomes = Outcomes()
        self._stages: list[Stage] = []
        self._waiting: list[Stage] = []
        self._running: dict[str, tuple[Stage, Future[None]]] = {}
        self._paused: dict[str, _Computation] = {}
        #: of a shared run, the stages of which this command computes units now
        self._computing: dict[str, StageContext] = {}
        #: the stages that were not stored
        self._ran: set[str] = set()
        self._estimates: dict[str, Estimate | None] = {}
        self._lock, self._due = threading.Lock(), time.monotonic()
        self._written: int | None = None  # changes of the ledger that are in the tables

    def run(self, stages: Sequence[Stage], at_end: Callable[[], None] = lambda: None) -> str | None:
        """Run the stages that are not finished; a failure stops only the stages that need it.

        ``at_end`` derives rows from those of all stages, whether or not some failed.

        Returns:
            None if all stages are finished, otherwise the first failure: its stage or unit, and
            why.

        Raises:
            KeyboardInterrupt: Ctrl-C; running stages are recorded as interrupted, for which this
                thread waits up to 30 s.
            UnitError: the graph cannot grow.

        """
        session, outcomes, ordered = self._session, self._outcomes, in_order(stages)
        if session.ledger.count("units"):  # an earlier command may have been killed before it
            self._write_tables()
        left = [s for s in stages if s.always_rerun or not all_stored([s], session.ledger)]
        is_concurrent = session.launcher.concurrent and (self._grow is not None or len(left) > 1)
        try:
            self._add(ordered)
            self._extend()
            while self._waiting or self._running:
                startable = self._startable(_MOST_STAGES if is_concurrent else 1)
                if not startable and not self._running:
                    self._become_alone()
                for stage in startable:
                    self._waiting.remove(stage)
                    future = Future[None]()  # before the start, in which Ctrl-C may come
                    self._running[stage.key] = stage, future
                    # a daemon thread: the interpreter would wait for an executor's at exit
                    work = threading.Thread(
                        target=self._settle, args=(stage, future), name=stage.key, daemon=True
                    )
                    work.start() if is_concurrent else work.run()
                self._await_stages(_POLL_S)
                over = [name for name, (_, future) in self._running.items() if future.done()]
                for name in over:
                    stage, future = self._running.pop(name)
                    future.result()
                    self._waiting += [stage] if name in self._paused else []
                if over:
                    self._extend()
            self._become_alone()
            at_end()
        except BaseException:
            if is_concurrent:
                outcomes.is_interrupted = True
                session.launcher.interrupt()
                self._await_stages(_END_S, all_of_them=True)
            for paused in filter(lambda each: each.is_shown, self._paused.values()):
                self._record(paused.context.stage, "interrupted", paused)
            raise
        finally:
            if session.shared is not None:
                session.shared.leave()
            self._write_tables(at_the_end=True)
            # not earlier: trainings write their files of the table while they run
            if self._ran and session.is_alone:
                tables.conform(session.run_dir, session.tables["steps"])
        return next((f"{stage}: {why}" for stage, why in outcomes.failures.items()), None)

    def _become_alone(self) -> None:
        """Wait until no other command computes units of a shared run, to do the rest alone.

        Raises:
            EndedElsewhereError: another one has done the rest.

        """
        if (shared := self._session.shared) is None or shared.is_alone:
            return
        shared.become_alone()
        self._ran.update(stage.key for stage in self._stages)  # by whichever command
        for stage in self._stages:
            if all_stored([stage], shared):
                self._outcomes.failures.pop(stage.key, None)  # another command has done it
                if (shared.get("stages", stage.key) or {}).get("status") != "succeeded":
                    self._record(stage, "succeeded")  # the command that stored it was killed

    def _extend(self) -> None:
        if self._grow is not None:
            session = self._session
            self._add(self._grow(session.ledger, self._outcomes, session.display.say))

    def _add(self, stages: Sequence[Stage]) -> None:
        """Add stages, each behind what it needs."""
        longest: dict[str, int] = {}  # number of stages to the end of the graph
        for stage in reversed(stages):
            after = [longest[other.key] for other in stages if stage.key in other.needed_keys]
            longest[stage.key] = 1 + max(after, default=0)
        self._waiting += sorted(stages, key=lambda stage: longest[stage.key], reverse=True)
        self._stages.extend(stages)
        session, ledger = self._session, self._session.ledger
        if session.durations is not None:
            self._estimates |= session.durations.estimates(
                (s, s.units if s.always_rerun else unfinished(s, s.seen(ledger))) for s in stages
            )
        cpus = sum(node.cpus for node in session.nodes)
        session.display.expect(self._stages, self._estimates, cpus, len(session.gpus))

    def _startable(self, most: int) -> Sequence[Stage]:
        """Return the stages to start now, so that no more than this number run.

        One of which another stage has ended since it was paused looks for further units. Of a
        shared run it always does, and stages that run again after others are left to the end.
        """
        is_alone = self._session.is_alone
        unsettled = {*self._running, *(stage.key for stage in self._waiting)}
        ready = [
            stage
            for stage in self._waiting
            if (
                not is_alone or self._paused[stage.key].context.has_news
                if stage.key in self._paused
                else any(map(unsettled.isdisjoint, stage.starts))
            )
            and (is_alone or not stage.always_rerun)
        ][: most - len(self._running)]
        alone = [stage for stage in ready if stage.alone]
        if any(stage.alone for stage, _ in self._running.values()) or (alone and self._running):
            return []
        return alone[:1] or ready

    def _await_stages(self, seconds: float, *, all_of_them: bool = False) -> None:
        futures = [future for _, future in self._running.values()]
        wait(futures, seconds, ALL_COMPLETED if all_of_them else FIRST_COMPLETED)

    def _settle(self, stage: Stage, future: Future[None]) -> None:
        """Run a stage until it has ended, or is paused."""
        try:
            paused = self._paused.pop(stage.key, None)
            end = self._without_start(stage) if paused is None else None
            if end is None:
                end = self._compute(paused or self._start(stage))
            if end is not None:
                self._outcomes.end(stage.key, end[1])
                self._session.display.settle(stage.key)
            future.set_result(None)
        except BaseException as error:  # re-raised in the main thread
            future.set_exception(error)

    def _without_start(self, stage: Stage) -> _End | None:
        """Return the end of a stage that cannot run, or of which all is stored."""
        session, failed = self._session, self._outcomes.failed
        if stage.units and all(map(failed, stage.starts)):
            needs = f"needs {', '.join(failed(stage.needed_keys))}"
            self._record(stage, "skipped")
            session.display.say(f"{stage.key}: skipped ({needs})")
            return "skipped", needs
        fresh = stage.always_rerun and not self._ran.isdisjoint(stage.needed_keys)
        if fresh or not all_stored([stage], session.ledger):
            return None
        row = session.ledger.get("stages", stage.key) or {}
        if session.is_alone and row.get("status") != "succeeded":
            self._record(stage, "succeeded")
        session.display.say(f"{stage.key}: done before")
        return "succeeded", None

    def _start(self, stage: Stage) -> _Computation:
        beside = partial(_beside, stage, self._stages, self._session.ledger)
        context = StageContext(stage, self._session, beside, self._outcomes)
        if (shared := self._session.shared) is not None and not shared.is_alone:
            return _Turns(context, shared, self._computing)
        computation = _Computation(context)
        _show(context)
        return computation

    def _compute(self, computation: _Computation) -> _End | None:
        """Compute what can be computed now, and record the end of the stage; None if it waits."""
        stage = computation.context.stage
        end: _End | None = "failed", None  # if not even its failure can be recorded
        try:
            end = self._outcome(computation)
        except (KeyboardInterrupt, SystemExit):
            end = "interrupted", None
            raise
        finally:
            if end is not None and computation.is_shown:
                self._record(stage, end[0], computation)
        if end is None:
            self._paused[stage.key] = computation
        else:
            self._ran.add(stage.key)
        return end

    def _outcome(self, computation: _Computation) -> _End | None:
        """Run the computation; record failures. Raises KeyboardInterrupt."""
        context, session = computation.context, self._session
        durations = session.durations
        try:
            if not computation.run():
                return None
            if needs := context.failed_needs():
                message = f"needs {', '.join(needs)}"
                context.say(f"{len(context.unfinished())} units left out ({message})")
                return "failed", message
            if context.elsewhere is not None:
                return "failed", context.elsewhere
            if durations is not None and session.is_alone and not context.resumed:
                seconds = time.monotonic() - context.created - context.waited_s
                took = Estimate(*(context.leased or (seconds, context.cpu_s, 0.0)))
                durations.remember(context.stage, computation.units, took)
        except UnitError as error:
            if not context.logs.any_failed:  # the stage itself raised it
                about = error.kind, error.message, "gave up", error.trace
                context.fail(Failure(error.unit, 1, *about))
            return error.status, brief(str(error))
        except Exception as error:  # recorded; other stages continue
            # the user ended the debugger, or Ray is gone after two Ctrl-C
            if isinstance(error, BdbQuit) or self._outcomes.is_interrupted:
                raise KeyboardInterrupt from None
            whole, trace = message_of(error), trace_of(error)
            context.fail(Failure(context.stage.name, 1, "error", whole, "gave up", trace))
            return "failed", brief(whole)
        return "succeeded", None

    def _record(self, stage: Stage, status: str, computation: _Computation | None = None) -> None:
        """Record the end of a stage, and show it if units were computed.

        Its duration includes earlier commands that did not finish it, or whose results it extends.
        """
        ledger = self._session.ledger
        row: Row = {
            "stage": stage.name,
            "variant": stage.variant,
            "status": status,
            "started_at": now(),
            "duration_s": 0.0,
            "device": None,
            "gpu_peak_bytes": None,
        }
        extends = False
        if computation is not None:
            context = computation.context
            row["duration_s"] = time.monotonic() - (context.began or context.created)
            row["started_at"] = ago(row["duration_s"])
            row |= {"device": context.device, "gpu_peak_bytes": context.gpu_peak_bytes}
            extends = not (computation.outdated or stage.always_rerun) and bool(computation.units)
            context.logs.close()
            self._session.display.end(stage.key, status, row["duration_s"], context.result)
        earlier = ledger.get("stages", stage.key)
        if earlier is not None and (extends or earlier["status"] != "succeeded"):
            row["duration_s"] += earlier["duration_s"]
            row["started_at"] = earlier["started_at"]
        ledger.put("stages", {stage.key: row})
        self._write_tables()

    def _write_tables(self, *, at_the_end: bool = False) -> None:
        """Write the tables unless they are new, and after stages in at most 5 % of the time.

        Thousands of short stages would otherwise write growing tables thousands of times. The
        ledger knows whether the tables are old: a search records a point after its last stage.
        """
        session = self._session
        if not session.is_alone:
            return
        with self._lock:
            start, changes = time.monotonic(), session.ledger.changes
            if changes == self._written or (start < self._due and not at_the_end):
                return
            self._written = changes  # before: others write rows meanwhile
            tables.write_tables(session.run_dir, session.ledger, session.tables, session.run_id)
            end = time.monotonic()
            self._due = end + _SHARE * (end - start)


def _beside(stage: Stage, stages: Sequence[Stage], ledger: Ledger) -> list[Stage]:
    """Return the unfinished stages that are neither before nor after a stage."""
    later, before = {stage.key}, set(stage.needed_keys)
    for other in stages:
        if later.intersection(other.needed_keys):
            later.add(other.key)
    for other in reversed(stages):
        if other.key in before:
            before.update(other.needed_keys)
    others = (other for other in stages if other.key not in later | before)
    return [other for other in others if not all_stored([other], ledger)]
