"""Everything that waits for a GPU, in order of value: what proves most comes first.

    python -m benchmarks.gpu                      # on a machine with a GPU, in under 30 minutes
    python -m benchmarks.gpu --quick --minutes 9  # smaller sizes, where a card is there for minutes
    python -m benchmarks.gpu --rehearse           # tiny trainings on the CPU, in some minutes

Each part runs in a process of its own with a time limit, so that a crash or a hang costs that part
alone; the processes share what is imported. A row is in the folder of the results as soon as it is
measured, and the page ``results.md`` follows. The same command continues: finished parts are kept,
and one that was cut off goes on after its last row. Two GPUs add a part.

Results: ``benchmarks/results/gpu/<device>``, with ``--quick`` ``<device>-quick``; those of a
rehearsal in a temporary folder; or --out.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from tempfile import mkdtemp
from typing import Annotated

import psutil
import typer

from benchmarks.gpu_parts.bench import Bench, Machine, Row, read_rows, write_rows
from benchmarks.gpu_parts.page import page
from benchmarks.gpu_parts.parts import PARTS, Part
from raypipe.hardware import detect

PROJECT = Path(__file__).resolve().parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "gpu"
#: run directories of parts that are not finished
WORK = PROJECT / "runs" / "gpu"
OUTCOMES = "parts"
#: statuses of parts that are not tried again
FINAL = ("done",)
#: statuses of parts that did not start
_NOT_TRIED = ("skipped", "not started")
#: seconds that a part needs at least, and that an overdue one has to end in order: an interrupted
#: run stores its state, and Ray ends
_LEAST_S, _GRACE_S = 10, 10
#: seconds in which killed processes disappear
_KILLED_S = 5
#: file in a part's folder with the CPU time that it took
_CPU = "cpu_s"


def to_do(parts: Sequence[Part], outcomes: Sequence[Row], *, again: bool) -> list[Part]:
    """Return the parts that are not finished, in their order; all of them if ``again``."""
    final = {row["part"] for row in outcomes if row["status"] in FINAL}
    return [part for part in parts if again or part.name not in final]


def foreign(outcomes: Sequence[Row], machine: Machine, *, quick: bool) -> str | None:
    """Return why stored results are not of this machine, or of other sizes; None if they are."""
    for row in outcomes:
        if bool(row["rehearsal"]) != machine.rehearsal:
            return "is of a rehearsal" if row["rehearsal"] else "is not of a rehearsal"
        if row["device"] != machine.device:
            return f"is of {row['device']}, and this is {machine.device}"
        if bool(row["quick"]) != quick:
            return f"is {'of' if row['quick'] else 'not of'} a --quick call"
    return None


def attempt(part: Part, bench: Bench, seconds: float, *, again: bool) -> tuple[str, str]:
    """Run a part if it can run in the time that is left; return its status and a note.

    With ``again``, it does not continue an earlier try.
    """
    if (obstacle := part.obstacle(bench.machine)) is not None:
        return "skipped", obstacle
    if seconds < _LEAST_S:
        return "not started", "no time was left; the same command continues"
    if again:
        shutil.rmtree(bench.folder, ignore_errors=True)
        write_rows(bench.out, part.name, [])
    typer.echo(f"== {part.name}: {part.title} (at most {seconds:.0f} s)")
    return run_part(part, bench, seconds)


def run_part(part: Part, bench: Bench, seconds: float) -> tuple[str, str]:
    """Run a part in its own process; return its status and a note.

    After its time limit it is ended, and so is every process that it leaves.
    """
    bench.folder.mkdir(parents=True, exist_ok=True)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["raypipe.training.loop", "benchmarks.gpu_parts.parts"])
    child = processes.Process(target=_child, args=(part.function, bench))
    child.start()
    try:
        child.join(seconds)
        overdue = child.exitcode is None
    finally:
        _end(child)
    if overdue:
        return "timed out", f"after {seconds:.0f} s; the same command continues it"
    if child.exitcode:
        return "failed", f"exit status {child.exitcode}; the error is in the output above"
    rows = read_rows(bench.out, part.name)
    errors = [row["error"] for row in rows if row.get("error")]
    if len(errors) == len(rows):
        return "failed", errors[0] if errors else "there are no rows"
    return "done", f"{len(errors)} of {len(rows)} rows have an error" if errors else ""


def _child(function: Callable[[Bench], None], bench: Bench) -> None:
    """Run a part in this process, which leads a session."""
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # loader processes begin as elsewhere
    signal.signal(signal.SIGTERM, interrupt)
    os.environ["RAYPIPE_CACHE"] = str(bench.cache)
    if bench.machine.rehearsal:
        import torch

        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        torch.set_num_threads(1)
    try:
        with suppress(KeyboardInterrupt):  # its time is over
            function(bench)
    finally:
        used = [getrusage(whose) for whose in (RUSAGE_SELF, RUSAGE_CHILDREN)]
        seconds = sum(each.ru_utime + each.ru_stime for each in used)
        (bench.folder / _CPU).write_text(f"{seconds:.2f}")


def interrupt(number: int, frame: object) -> None:
    """Handle a signal like Ctrl-C: what runs ends in order."""
    del number, frame
    raise KeyboardInterrupt


def _end(child: BaseProcess) -> None:
    """End a process in order if it runs, and kill the others of its session, such as Ray's."""
    if child.exitcode is None:
        child.terminate()
        child.join(_GRACE_S)
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended
            if os.getsid(process.pid) == child.pid:
                process.kill()
                killed.append(process)
    child.join()
    psutil.wait_procs(killed, timeout=_KILLED_S)  # they hold memory of the card until then


def write_page(out: Path) -> Path:
    """Write the page of the stored results and return its path."""
    target = out / "results.md"
    rows = {part.name: read_rows(out, part.name) for part in PARTS}
    target.write_text(page(read_rows(out, OUTCOMES), rows), encoding="utf-8")
    return target


def main(
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run small trainings on the CPU.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure smaller sizes: all parts in nine minutes.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Run this part: {', '.join(p.name for p in PARTS)}.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure finished parts again.")] = False,
    minutes: Annotated[float, typer.Option(min=0, help="Time limit of this call.")] = 30,
    out: Annotated[Path | None, typer.Option(help="Folder of the results.")] = None,
) -> None:
    """Run the parts that are not finished, and write the page."""
    deadline = time.monotonic() + 60 * minutes - _GRACE_S
    signal.signal(signal.SIGTERM, interrupt)  # the part's processes end, too
    if unknown := sorted(set(only or []) - {part.name for part in PARTS}):
        _refuse(f"--only {unknown[0]}: there are {', '.join(part.name for part in PARTS)}")
    machine = Machine.here(rehearsal=rehearse)
    if not machine.gpus and not rehearse:
        hardware = detect()
        reason = next(iter(hardware.gpu_problems), hardware.gpu_note)
        _refuse(f"no GPU can be used here: {reason}; rehearse on the CPU with --rehearse")
    slug = re.sub(r"[^a-z0-9]+", "-", machine.device.lower()).strip("-") + "-quick" * quick
    if out is None:
        out = Path(mkdtemp(prefix="raypipe-gpu-")) if rehearse else RESULTS / slug
    if rehearse and RESULTS in (out.resolve(), *out.resolve().parents):
        _refuse(f"--out {out}: is for measurements on GPUs; give a rehearsal another folder")
    earlier = read_rows(out, OUTCOMES)
    if problem := foreign(earlier, machine, quick=quick):
        _refuse(f"--out {out}: {problem}; give another folder")
    work = (out / "runs" if rehearse else WORK / slug).resolve()
    chosen = [part for part in PARTS if not only or part.name in only]
    tried = {row["part"] for row in earlier if row["status"] not in _NOT_TRIED}
    statuses = {row["part"]: row["status"] for row in earlier}
    for part in to_do(chosen, earlier, again=again):
        bench = Bench(machine, part.name, work, out.resolve(), quick)
        limit = part.limit(minutes, quick=quick and not rehearse)
        began, seconds = time.monotonic(), min(limit, deadline - time.monotonic())
        status, note = attempt(part, bench, seconds, again=again)
        statuses[part.name] = status
        if status in _NOT_TRIED and part.name in tried:
            note += "; its results are kept"
        else:
            _record(bench, status, note, time.monotonic() - began)
        typer.echo(f"== {part.name}: {status}{f', {note}' if note else ''}")
        if status in FINAL:
            shutil.rmtree(bench.folder, ignore_errors=True)
    typer.echo(f"page: {write_page(out)}")
    if any(statuses.get(part.name) not in (*FINAL, "skipped") for part in chosen):
        raise typer.Exit(1)


def _record(bench: Bench, status: str, note: str, seconds: float) -> None:
    """Store the outcome of a part, and the page."""
    cpu = bench.folder / _CPU
    row = {
        "part": bench.part,
        "status": status,
        "note": note,
        "duration_s": seconds,
        "cpu_s": float(cpu.read_text()) if cpu.exists() else None,
        "quick": bench.quick,
        **bench.machine.columns,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    rows = {each["part"]: each for each in (*read_rows(bench.out, OUTCOMES), row)}
    write_rows(bench.out, OUTCOMES, [rows[part.name] for part in PARTS if part.name in rows])
    write_page(bench.out)


def _refuse(message: str) -> None:
    typer.echo(f"benchmarks.gpu: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
