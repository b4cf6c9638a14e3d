"""The page of the results, from stored rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_parts.bench import Row
from benchmarks.gpu_parts.parts import PARTS, Part
from benchmarks.gpu_parts.training import MFU_GOAL, RESERVED_GOAL
from raypipe.hardware import bytes_text
from raypipe.report.formatting import MISSING, cell, heading, number, percent

_SPEED = "samples_per_s step_time_s mfu gpu_peak_bytes"
_CONTENDERS = (
    "contender compile micro_batch accumulation tokens_per_s step_time_s ratio ratio_low "
    "ratio_high mfu cpu_s steps_bytes bursts loss_difference"
)
#: columns of each part's section, separated by spaces; the file of the part has all
_COLUMNS = {
    "rates": "key rate unit data_sheet share context_bytes predicted_context_bytes capacity_bytes",
    "loop": _CONTENDERS,
    "mfu": "compile dropout micro_batch accumulation precision tokens_per_s "
    f"{_SPEED} mfu_measured loader_wait_share",
    "out_of_memory": "precision micro_batch expected found as_predicted predicted_peak_bytes "
    "gpu_peak_bytes attempts micro_batch_at_end accumulation_at_end checkpointing_at_end",
    "losses": "workload phase precision difference_max difference_mean loss_final samples_per_s "
    "gpu_peak_bytes skipped_steps",
    "telemetry": "source samples gpu_util_mean power_w_mean memory_max_bytes energy_j",
    "trainers": _CONTENDERS,
    "quickstart": "status steps command_s training_s samples_per_s gpu_util_mean gpu_peak_bytes "
    "loss_final",
    "pabbo": "phase runs_on samples samples_per_s step_time_s kernels kernels_s graph_s graph",
    "predictions": "workload precision micro_batch accumulation predicted_peak_bytes "
    "gpu_peak_bytes peak_ratio predicted_step_time_s step_time_s speed_ratio speed_within_interval",
    "t5": f"precision micro_batch {_SPEED} loss_first loss_final eval_cross_entropy",
    "loader": "loader_workers samples_per_s step_time_s loader_wait_share gpu_util_mean",
    "teleclass": "case status duration_s samples_per_s gpu_peak_bytes example_f1",
    "sweep": "micro_batch precision status samples_per_s gpu_peak_bytes energy_j parity "
    "recommended",
    "two_cards": f"case {_SPEED} speedup loss_quotient attempts failures micro_batch_at_end",
}
_REHEARSAL = "Rehearsal on the CPU: nothing on this page is a measurement of a GPU"
#: shares and relative differences
_PERCENT = (
    *("difference_max", "difference_mean", "mfu", "mfu_measured", "loader_wait_share", "parity"),
    "share",
)


def page(outcomes: Sequence[Row], rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the page in Markdown.

    Args:
        outcomes: a row per part that was tried: ``part``, ``status``, ``note``, ``duration_s``, and
            the columns of the machine.
        rows: the rows of each part by its name.

    """
    by_name = {row["part"]: row for row in outcomes}
    first = outcomes[0] if outcomes else {}
    title = _REHEARSAL if first.get("rehearsal") else f"GPU benchmarks: {first.get('device')}"
    known = {
        name: ", ".join(dict.fromkeys(str(row[name]) for row in outcomes if row[name] is not None))
        for name in ("device", "driver", "torch", "commit")
    }
    about = [(heading(name), text or MISSING) for name, text in known.items()]
    table = [_outcome(part, by_name.get(part.name)) for part in PARTS]
    blocks = [
        f"# {title}",
        "Made by `python -m benchmarks.gpu`; do not edit. The files next to this page have all "
        "columns.",
        markdown_table(["", ""], about),
        markdown_table(["part", "status", "time", "CPU time", "note"], table),
    ]
    for part in PARTS:
        if found := rows.get(part.name):
            blocks += [f"## {part.title}", *_section(part, found)]
    return "\n\n".join(blocks) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a pipe table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _outcome(part: Part, row: Row | None) -> list[str]:
    if row is None:
        return [part.title, "not started", MISSING, MISSING, ""]
    times = [_cell(name, row.get(name)) for name in ("duration_s", "cpu_s")]
    return [part.title, row["status"], *times, _plain(row["note"] or "")]


def _section(part: Part, rows: Sequence[Row]) -> list[str]:
    """Return the verdict of a part, and its table without columns that are empty."""
    named = _COLUMNS[part.name].split()
    columns = [name for name in named if any(not _empty(row.get(name)) for row in rows)]
    cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    errors = [_plain(str(row["error"])) for row in rows if not _empty(row.get("error"))]
    verdict = _VERDICTS.get(part.name)
    return [
        *([verdict(rows)] if verdict is not None else []),
        markdown_table([heading(name) for name in columns], cells),
        *(f"Not measured: {text}" for text in dict.fromkeys(errors)),
    ]


def _cell(name: str, value: Any) -> str:
    if _empty(value):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _PERCENT:
        return percent(value)
    return _plain(cell(name, value))


def _empty(value: Any) -> bool:
    return value is None or value != value  # NaN


def _plain(text: str) -> str:
    """Return a text for a cell of a table: one line without a pipe."""
    return " ".join(text.replace("|", "/").split())


def _losses(rows: Sequence[Row]) -> str:
    worst: dict[str, float] = {}
    for row in rows:
        if row["precision"] != "fp32" and not _empty(row["difference_max"]):
            worst[row["precision"]] = max(worst.get(row["precision"], 0.0), row["difference_max"])
    if not worst:
        return "No precision could be compared with fp32."
    found = ", ".join(f"{name} {percent(value)}" for name, value in worst.items())
    return f"Largest relative difference of a logged loss to fp32: {found}."


def _out_of_memory(rows: Sequence[Row]) -> str:
    trained = _known(rows, "as_predicted")
    return f"{sum(trained):.0f} of {len(trained)} trainings ended as predicted."


def _predictions(rows: Sequence[Row]) -> str:
    peaks = _known(rows, "peak_ratio")
    speeds = _known(rows, "speed_ratio")
    texts = []
    if peaks:
        texts.append(f"memory {number(min(peaks))} to {number(max(peaks))}")
    if speeds:
        texts.append(f"speed {number(min(speeds))} to {number(max(speeds))}")
    return f"Measured over predicted: {', '.join(texts) or 'nothing was measured'}."


def _mfu(rows: Sequence[Row]) -> str:
    compiled = next((row for row in rows if row.get("compile")), {})
    share, of_rate, reserved = (
        _cell(name, compiled.get(name)) for name in ("mfu", "mfu_measured", "gpu_peak_bytes")
    )
    goals = f"MFU {percent(MFU_GOAL)} on an H100, less than {bytes_text(RESERVED_GOAL)} reserved"
    return (
        f"Goals when compiled: {goals}. Measured: {share} of the data sheet's peak, {of_rate} of "
        f"the rate that products of matrices reach on this card, {reserved}."
    )


def _contenders(rows: Sequence[Row]) -> str:
    ours = next((row for row in rows if row.get("contender") == "raypipe_loop"), {})
    if _empty(ours.get("ratio")):
        return "raypipe's loop was not compared."
    low, high = number(ours["ratio_low"]), number(ours["ratio_high"])
    return (
        f"raypipe's loop has {number(ours['ratio'])} times the speed of the one by hand "
        f"({low} to {high} in bursts of ten steps in alternation)."
    )


def _known(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if not _empty(row.get(name))]


_VERDICTS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "loop": _contenders,
    "trainers": _contenders,
    "losses": _losses,
    "out_of_memory": _out_of_memory,
    "predictions": _predictions,
    "mfu": _mfu,
}
