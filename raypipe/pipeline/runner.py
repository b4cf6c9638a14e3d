"""Plan, skip, launch, record: the stages of a configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from raypipe.errors import ConfigError, UnitError
from raypipe.pipeline.context import Session, StageContext, is_done, status_of
from raypipe.pipeline.experiment import Stage, in_order
from raypipe.pipeline.identity import differences
from raypipe.pipeline.scheduler import in_lanes
from raypipe.provenance import now
from raypipe.redaction import shown_traceback
from raypipe.storage import tables as results
from raypipe.storage.ledger import Ledger, Row

log = logging.getLogger(__name__)


def refuse_changes(ledger: Ledger, stages: Sequence[Stage], where: str) -> None:
    """Refuse a configuration that would alter stored results.

    Raises:
        ConfigError: the keys that differ, with the stored and the asked value.

    """
    for stage in stages:
        if stage.derived:
            continue
        for unit in stage.units:
            stored = ledger.get("units", unit.slot)
            if stored is None:
                continue
            found = differences(stored["identity"], unit.identity)
            if stored["extent"] > unit.extent:
                found[unit.extent_key] = (stored["extent"], unit.extent)
            if found:
                lines = [
                    f"  {key}: stored {left!r}, now {right!r}"
                    for key, (left, right) in found.items()
                ]
                raise ConfigError(
                    f"{where}: holds {unit.slot} with other settings, which this command would "
                    "alter; use another --run-dir, or take back:\n" + "\n".join(lines)
                )


def run_stages(stages: Sequence[Stage], session: Session) -> str | None:
    """Run what is not done; a failure stops only the stages that need it.

    Where there are GPUs, stages that work on them and the others run beside each other, in
    threads; else one stage runs after the other, in this one.

    Returns:
        None when all is done, else what failed: the stage's or the unit's name and why.

    Raises:
        KeyboardInterrupt: Ctrl-C; what was under way is recorded as interrupted.

    """
    broken: dict[str, str] = {}
    ran: set[str] = set()
    ordered = in_order(stages)

    def run(stage: Stage) -> None:
        needs = [need for need in stage.needs if need in broken]
        if needs:
            broken[stage.name] = f"needs {', '.join(needs)}"
            _record_stage(session, stage, "skipped", now(), 0.0, None)
            session.display.say(f"{stage.name}: skipped ({broken[stage.name]})")
            return
        fresh = stage.derived and any(need in ran for need in stage.needs)
        if not fresh and all_stored([stage], session.ledger):
            if (session.ledger.get("stages", stage.name) or {}).get("status") != "succeeded":
                _record_stage(session, stage, "succeeded", now(), 0.0, None)
                _write_tables(session)
            session.display.say(f"{stage.name}: done before")
            return
        error = _run_stage(stage, session)
        ran.add(stage.name)
        if error is not None:
            broken[stage.name] = error

    if session.ledger.rows("units"):  # an earlier command may have been killed before it wrote them
        _write_tables(session)
    open_lanes = {s.on_gpu for s in ordered if s.derived or not all_stored([s], session.ledger)}
    if any(node.gpus for node in session.nodes) and len(open_lanes) > 1:
        in_lanes(ordered, run, session.launcher.interrupt)
    else:
        for stage in ordered:
            run(stage)
    first = next(iter(broken.items()), None)
    return None if first is None else f"{first[0]}: {first[1]}"


def all_stored(stages: Sequence[Stage], ledger: Ledger) -> bool:
    """Whether every unit of these stages is done."""
    return all(is_done(ledger, unit) for stage in stages for unit in stage.units)


def _run_stage(stage: Stage, session: Session) -> str | None:
    context = StageContext(stage, session)
    started_at, clock = now(), time.monotonic()
    status, message = "failed", None

    try:
        stage.run(context)
        status = "succeeded"
    except UnitError as error:
        status, message = status_of(error), str(error)
    except (KeyboardInterrupt, SystemExit):
        status = "interrupted"
        raise
    except Exception as error:  # a stage may raise anything: it is recorded, the rest goes on
        message = f"{type(error).__name__}: {error}"
        trace = shown_traceback()
        log.error("stage %s failed\n%s", stage.name, trace)  # noqa: TRY400
        context.fail(stage.name, 1, "error", trace)
    finally:
        seconds = time.monotonic() - clock
        _record_stage(session, stage, status, started_at, seconds, context)
        session.display.end(stage.name, status, seconds)
        _write_tables(session)
    return message


def _record_stage(
    session: Session,
    stage: Stage,
    status: str,
    started_at: str,
    duration_s: float,
    context: StageContext | None,
) -> None:
    row: Row = {
        "stage": stage.name,
        "status": status,
        "started_at": started_at,
        "duration_s": duration_s,
        "device": context.device if context else None,
        "gpu_peak_bytes": context.gpu_peak_bytes if context else None,
    }
    session.ledger.put("stages", {stage.name: row})


def _write_tables(session: Session) -> None:
    with session.writing:  # or an older table might replace a newer one
        tables = results.single_tables(session.ledger)
        results.write_tables(session.run, session.ledger, tables, session.run_id)
