"""Run the stages of a configuration: skip what is stored, launch the rest, record outcomes."""

from __future__ import annotations

import time
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

from raypipe.errors import UnitError, message_of, trace_of
from raypipe.graph.context import StageContext
from raypipe.graph.continuation import BEGUN, all_stored, is_done, is_outdated
from raypipe.graph.durations import Estimate
from raypipe.graph.experiment import Stage, Unit, in_order
from raypipe.graph.scheduler import Outcomes, run_concurrently, run_in_sequence
from raypipe.graph.session import Session
from raypipe.graph.unit_logs import Failure, brief
from raypipe.provenance import now
from raypipe.store import tables
from raypipe.store.ledger import Ledger, Row

#: time between two writings of the tables, in units of the time that one takes
_SHARE = 20


#: further stages of a graph from the stored rows and the outcomes so far; reports lines to show
Grow = Callable[[Ledger, Outcomes, Callable[[str], None]], Sequence[Stage]]


def run_stages(stages: Sequence[Stage], session: Session, grow: Grow | None = None) -> str | None:
    """Run the stages that are not finished; a failure stops only the stages that need it.

    Stages run concurrently if the launcher allows it, otherwise in sequence, in this thread.
    ``grow`` returns further stages whenever one has ended.

    Returns:
        None if all stages are finished, otherwise the first failure: its stage or unit, and why.

    Raises:
        KeyboardInterrupt: Ctrl-C; running stages are recorded as interrupted.
        UnitError: the graph cannot grow.

    """
    outcomes = Outcomes()
    ran: set[str] = set()
    ordered = in_order(stages)
    estimates: dict[str, Estimate | None] = {}
    cpus = sum(node.cpus for node in session.nodes)
    gpus = sum(len(node.gpus) for node in session.nodes)
    writer = _TableWriter(session)

    def expect(added: Sequence[Stage]) -> None:
        estimates.update(_estimates(session, added))
        session.display.expect(ordered, estimates, cpus, gpus)

    expect(ordered)

    def further() -> Sequence[Stage]:
        if grow is None:
            return ()
        added = grow(session.ledger, outcomes, session.display.say)
        if added:
            ordered.extend(added)
            expect(added)
        return added

    def run(stage: Stage) -> None:
        outcomes.end(stage.key, run_one(stage))
        session.display.settle(stage.key)

    def run_one(stage: Stage) -> str | None:
        """Run a stage unless it is stored or cannot run; return why it failed."""
        broken = bool(stage.units) and all(map(outcomes.failed, map(stage.needed_by, stage.units)))
        if broken and not stage.after_failures:
            needs = f"needs {', '.join(outcomes.failed(stage.needed_keys))}"
            _record_stage(session, stage, "skipped", now(), 0.0, None)
            session.display.say(f"{stage.key}: skipped ({needs})")
            writer.after_stage()
            return needs
        fresh = stage.always_rerun and any(need in ran for need in stage.needed_keys)
        if not fresh and all_stored([stage], session.ledger):
            if (session.ledger.get("stages", stage.key) or {}).get("status") != "succeeded":
                _record_stage(session, stage, "succeeded", now(), 0.0, None)
                writer.after_stage()
            session.display.say(f"{stage.key}: done before")
            return None
        beside = partial(_beside, stage, ordered, session.ledger)
        context = StageContext(stage, session, beside, outcomes)
        failure = _run_stage(context, writer, outcomes)
        ran.add(stage.key)
        return failure

    def interrupt() -> None:
        outcomes.interrupt()
        session.launcher.interrupt()

    if session.ledger.rows("units"):  # an earlier command may have been killed before it wrote them
        writer.after_stage()
    unfinished = [s for s in ordered if s.always_rerun or not all_stored([s], session.ledger)]
    try:
        if session.launcher.concurrent and (grow is not None or len(unfinished) > 1):
            run_concurrently(tuple(ordered), run, interrupt, further)
        else:
            run_in_sequence(tuple(ordered), run, further)
    finally:
        writer.complete()
        if ran:  # not earlier: trainings write their files of the table while they run
            tables.conform(session.run_dir, session.tables["steps"])
    first = next(iter(outcomes.failures.items()), None)
    return None if first is None else f"{first[0]}: {first[1]}"


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


def _run_stage(context: StageContext, writer: _TableWriter, outcomes: Outcomes) -> str | None:
    stage, session = context.stage, context.session
    started_at, clock = now(), time.monotonic()
    status, message = "failed", None
    units = context.unfinished()
    extends = _extends(stage, units, session.ledger)
    waits = stage.training is not None
    session.display.start(stage.key, "waiting for resources" if waits else stage.workload)

    try:
        _begin(context)
        context.todo()
        stage.run(context)
        if len(stage.units) == 1 and (stage.always_rerun or context.unfinished()):
            context.finish(stage.units[0].key)
        while context.await_units():
            stage.run(context)
        if needs := context.failed_needs():
            message = f"needs {', '.join(needs)}"
            context.say(f"{len(context.unfinished())} units left out ({message})")
        else:
            status = "succeeded"
            _remember(context, units, time.monotonic() - clock - context.waited_s)
    except UnitError as error:
        status, message = error.status, brief(str(error))
        if not context.logs.any_failed:  # the stage itself raised it
            about = error.kind, error.message, "gave up", error.trace
            context.fail(Failure(error.unit, 1, *about))
    except BdbQuit:  # the user ended the debugger
        status = "interrupted"
        raise KeyboardInterrupt from None
    except (KeyboardInterrupt, SystemExit):
        status = "interrupted"
        raise
    except Exception as error:  # recorded; other stages continue
        if outcomes.is_interrupted:  # an effect of it: Ray may be gone after a second Ctrl-C
            status = "interrupted"
            raise KeyboardInterrupt from None
        whole = message_of(error)
        message = brief(whole)
        context.fail(Failure(stage.name, 1, "error", whole, "gave up", trace_of(error)))
    finally:
        started_at, clock = context.began or (started_at, clock)
        seconds = time.monotonic() - clock
        _record_stage(session, stage, status, started_at, seconds, context, extends=extends)
        context.logs.close()
        session.display.end(stage.key, status, seconds)
        writer.after_stage()
    return message


def _begin(context: StageContext) -> None:
    """Record which unfinished units restart, and forget what they left before.

    These are the units whose needs can go on: if that happens before a unit is finished, its parts
    are out of date.
    """
    stage, outdated, begun = context.stage, [], []
    for unit in context.unfinished():
        stored = context.ledger.get("units", unit.key)
        if stored is not None and is_outdated(stored, unit):
            outdated.append(unit)
        if unit.extents and (stored is None or is_outdated(stored, unit)):
            begun.append(unit)
    if outdated and not stage.always_rerun:
        context.say("computed again: what it needs has gone on")
        if stage.forget is not None:
            stage.forget(context, outdated)
    if begun:
        context.ledger.put_tables(context.records(begun, BEGUN))


def _extends(stage: Stage, units: Sequence[Unit], ledger: Ledger) -> bool:
    """Whether units to compute add to the stored results of a stage, and replace none of them."""
    stored = [(stage.seen(ledger).get("units", unit.key), unit) for unit in units]
    replaced = any(row is not None and is_outdated(row, unit) for row, unit in stored)
    return bool(units) and not replaced and not stage.always_rerun


def _estimates(session: Session, stages: Sequence[Stage]) -> dict[str, Estimate | None]:
    """Return the expected time of what is unfinished of each stage; None if unknown."""
    if session.durations is None:
        return {}
    todo = [
        [u for u in s.units if s.always_rerun or not is_done(s.seen(session.ledger), u)]
        for s in stages
    ]
    found = session.durations.estimates(zip(stages, todo, strict=True))
    return {stage.key: estimate for stage, estimate in zip(stages, found, strict=True)}


def _remember(context: StageContext, units: Sequence[Unit], seconds: float) -> None:
    """Remember what a stage's units took; a training that continued took less than a whole one."""
    durations = context.session.durations
    if durations is None or context.resumed:
        return
    took = context.leased or (seconds, context.cpu_s, 0.0)
    durations.remember(context.stage, units, Estimate(*took))


def _record_stage(
    session: Session,
    stage: Stage,
    status: str,
    started_at: str,
    duration_s: float,
    context: StageContext | None,
    *,
    extends: bool = False,
) -> None:
    """Record a stage's outcome.

    Its duration includes earlier commands that did not finish it, or whose results it extends.
    """
    earlier = session.ledger.get("stages", stage.key)
    if earlier is not None and (extends or earlier["status"] != "succeeded"):
        duration_s += earlier["duration_s"]
        started_at = earlier["started_at"]
    row: Row = {
        "stage": stage.name,
        "variant": stage.variant,
        "status": status,
        "started_at": started_at,
        "duration_s": duration_s,
        "device": context.device if context else None,
        "gpu_peak_bytes": context.gpu_peak_bytes if context else None,
    }
    session.ledger.put("stages", {stage.key: row})


class _TableWriter:
    """Writes the tables after stages, in at most a twentieth of the time; at the end, if need be.

    Thousands of short stages would otherwise write growing tables thousands of times. The ledger
    knows whether the tables are old: a search records the outcome of a point after its last stage.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._lock = session, Lock()
        self._due, self._written = 0.0, -1

    def after_stage(self) -> None:
        """Write the tables, or leave it to a later stage."""
        with self._lock:
            if time.monotonic() >= self._due:
                self._write()

    def complete(self) -> None:
        """Write the tables if the ledger changed since they were written."""
        with self._lock:
            if self._written != self._session.ledger.changes:
                self._write()

    def _write(self) -> None:
        session, start = self._session, time.monotonic()
        self._written = session.ledger.changes  # before: others write rows meanwhile
        tables.write_tables(session.run_dir, session.ledger, session.tables, session.run_id)
        end = time.monotonic()
        self._due = end + _SHARE * (end - start)
