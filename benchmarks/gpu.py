"""Everything that waits for a GPU, in under 30 minutes on one card, in order of value.

    python -m benchmarks.gpu              # on a machine with a GPU; two GPUs add a part
    python -m benchmarks.gpu --rehearse   # small trainings on the CPU, in some minutes

Each part runs in a separate process with a time limit, so that a crash or a hang costs that part
alone. Its rows are stored as Parquet as soon as it ends, and the page ``results.md`` is written
again. The same command continues: finished parts are kept, and a part that was cut off continues
its trainings.

Results: ``benchmarks/results/gpu/<device>``; those of a rehearsal in a temporary folder, or --out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import pandas as pd
import psutil
import typer

from benchmarks.gpu_parts.bench import Bench, Machine, Row, plain
from benchmarks.gpu_parts.child import ROWS
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
#: seconds that a part needs at least, and that an overdue one has to end in order
_LEAST_S, _GRACE_S = 20, 20
#: seconds in which killed processes disappear
_KILLED_S = 5


def stored(out: Path, name: str) -> list[Row]:
    """Return the stored rows of a part, or the outcomes of all parts; none if there are none."""
    file = out / f"{name}.parquet"
    return plain(pd.read_parquet(file)) if file.exists() else []


def store(out: Path, name: str, rows: Sequence[Row]) -> None:
    """Replace the stored rows."""
    out.mkdir(parents=True, exist_ok=True)
    new = out / f"{name}.parquet.new"
    pd.DataFrame(list(rows)).to_parquet(new, index=False)
    new.replace(out / f"{name}.parquet")


def to_do(parts: Sequence[Part], outcomes: Sequence[Row], *, again: bool) -> list[Part]:
    """Return the parts that are not finished, in their order; all of them if ``again``."""
    final = {row["part"] for row in outcomes if row["status"] in FINAL}
    return [part for part in parts if again or part.name not in final]


def foreign(outcomes: Sequence[Row], machine: Machine) -> str | None:
    """Return why stored results are not of this machine; None if they are."""
    for row in outcomes:
        if bool(row["rehearsal"]) != machine.rehearsal:
            return "is of a rehearsal" if row["rehearsal"] else "is not of a rehearsal"
        if row["device"] != machine.device:
            return f"is of {row['device']}, and this is {machine.device}"
    return None


def attempt(part: Part, bench: Bench, seconds: float, *, again: bool) -> tuple[str, str, list[Row]]:
    """Run a part if it can run in the time that is left; return its status, a note, and its rows.

    With ``again``, it does not continue the trainings of an earlier try.
    """
    if (obstacle := part.obstacle(bench.machine)) is not None:
        return "skipped", obstacle, []
    if seconds < _LEAST_S:
        return "not started", "no time was left; the same command continues", []
    if again:
        shutil.rmtree(bench.folder, ignore_errors=True)
    typer.echo(f"== {part.name}: {part.title} (at most {seconds:.0f} s)")
    return run_part(part, bench, seconds)


def run_part(part: Part, bench: Bench, seconds: float) -> tuple[str, str, list[Row]]:
    """Run a part in its own process; return its status, a note, and its rows so far."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts.child", part.name, bench.dump()]
    environment = {"RAYPIPE_CACHE": str(bench.cache)}
    if bench.machine.rehearsal:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return collect(command, bench.folder, environment, seconds)


def collect(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[str, str, list[Row]]:
    """Run a command that writes rows into a folder; return its status, a note, and the rows.

    After its time limit it is ended, and so is every process that it leaves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROWS).unlink(missing_ok=True)
    child = subprocess.Popen(
        command, cwd=PROJECT, env={**os.environ, **environment}, start_new_session=True
    )
    status = None
    try:
        with suppress(subprocess.TimeoutExpired):
            status = child.wait(timeout=seconds)
    finally:
        _end(child)
    rows = _rows(folder / ROWS)
    if status is None:
        return "timed out", f"after {seconds:.0f} s; the same command continues it", rows
    if status:
        return "failed", f"exit status {status}; the error is in the output above", rows
    errors = [row["error"] for row in rows if row.get("error")]
    if len(errors) == len(rows):
        return "failed", errors[0] if errors else "there are no rows", rows
    return "done", f"{len(errors)} of {len(rows)} rows have an error" if errors else "", rows


def interrupt(number: int, frame: object) -> None:
    """Handle a signal like Ctrl-C."""
    del number, frame
    raise KeyboardInterrupt


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process in order if it runs, and kill the others of its session, such as Ray's."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_GRACE_S)
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended
            if os.getsid(process.pid) == child.pid:
                process.kill()
                killed.append(process)
    child.wait()
    psutil.wait_procs(killed, timeout=_KILLED_S)  # they hold memory of the card until then


def _rows(file: Path) -> list[Row]:
    """Return the rows that a part has written; a line that it did not finish is left out."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def write_page(out: Path) -> Path:
    """Write the page of the stored results and return its path."""
    target = out / "results.md"
    rows = {part.name: stored(out, part.name) for part in PARTS}
    target.write_text(page(stored(out, OUTCOMES), rows), encoding="utf-8")
    return target


def main(
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run small trainings on the CPU.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Run this part: {', '.join(p.name for p in PARTS)}.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure finished parts again.")] = False,
    minutes: Annotated[float, typer.Option(min=0, help="Time limit of this call.")] = 30,
    out: Annotated[Path | None, typer.Option(help="Folder of the results.")] = None,
) -> None:
    """Run the parts that are not finished, and write the page."""
    deadline = time.monotonic() + 60 * minutes
    signal.signal(signal.SIGTERM, interrupt)  # the part's processes end, too
    if unknown := sorted(set(only or []) - {part.name for part in PARTS}):
        _refuse(f"--only {unknown[0]}: there are {', '.join(part.name for part in PARTS)}")
    machine = Machine.here(rehearsal=rehearse)
    if not machine.gpus and not rehearse:
        hardware = detect()
        reason = next(iter(hardware.gpu_problems), hardware.gpu_note)
        _refuse(f"no GPU can be used here: {reason}; rehearse on the CPU with --rehearse")
    slug = re.sub(r"[^a-z0-9]+", "-", machine.device.lower()).strip("-")
    if out is None:
        out = Path(mkdtemp(prefix="raypipe-gpu-")) if rehearse else RESULTS / slug
    if rehearse and RESULTS in (out.resolve(), *out.resolve().parents):
        _refuse(f"--out {out}: is for measurements on GPUs; give a rehearsal another folder")
    if problem := foreign(stored(out, OUTCOMES), machine):
        _refuse(f"--out {out}: {problem}; give another folder")
    work = out / "runs" if rehearse else WORK / slug
    chosen = [part for part in PARTS if not only or part.name in only]
    earlier = stored(out, OUTCOMES)
    tried = {row["part"] for row in earlier if row["status"] not in _NOT_TRIED}
    statuses = {row["part"]: row["status"] for row in earlier}
    for part in to_do(chosen, earlier, again=again):
        bench = Bench(machine, (work / part.name).resolve())
        began, seconds = time.monotonic(), min(part.seconds, deadline - time.monotonic())
        status, note, rows = attempt(part, bench, seconds, again=again)
        statuses[part.name] = status
        if status in _NOT_TRIED and part.name in tried:
            note += "; its results are kept"
        else:
            _keep(out, part, machine, status, note, rows, time.monotonic() - began)
        typer.echo(f"== {part.name}: {status}{f', {note}' if note else ''}")
        if status in FINAL:
            shutil.rmtree(bench.folder, ignore_errors=True)
    typer.echo(f"page: {write_page(out)}")
    if any(statuses.get(part.name) not in (*FINAL, "skipped") for part in chosen):
        raise typer.Exit(1)


def _keep(
    out: Path,
    part: Part,
    machine: Machine,
    status: str,
    note: str,
    rows: Sequence[Row],
    seconds: float,
) -> None:
    """Store the rows and the outcome of a part, and the page."""
    about = {**machine.columns, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    if rows:
        store(out, part.name, [{"part": part.name, **row, **about} for row in rows])
    new = {"part": part.name, "status": status, "note": note, "duration_s": seconds, **about}
    others = [row for row in stored(out, OUTCOMES) if row["part"] != part.name]
    order = [each.name for each in PARTS]
    store(out, OUTCOMES, sorted([*others, new], key=lambda row: order.index(row["part"])))
    write_page(out)


def _refuse(message: str) -> None:
    typer.echo(f"benchmarks.gpu: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
