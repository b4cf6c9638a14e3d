"""Output of ``--card``: a line per prediction, and a sentence per recommendation."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.hardware import bytes_text
from raypipe.report.formatting import duration
from raypipe.store.ledger import Row

_TIMES = "times are of optimizer steps at full sample length; intervals in brackets"


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return predictions as they are printed: few columns, numbers as text."""
    priced = any(row["cost"] is not None for row in rows if row["micro_batch"] is not None)
    several = len({row["stage"] for row in rows}) > 1
    return [_shown(row, several=several, priced=priced) for row in rows]


def conclusion(rows: Sequence[Row]) -> str:
    """Return a sentence for each recommended prediction, and a note on what the times cover."""
    lines = []
    for row in rows:
        if row["recommended"]:
            words = f"{row['card']}, "
            if row["workers"] > 1:
                words = f"{row['workers']} x {row['card']}, {row['strategy']}, "
            words += f"profile {row['profile']}, {row['precision']}, "
            if row["gradient_checkpointing"]:
                words += "gradient checkpointing, "
            words += f"micro-batch {row['micro_batch']} x accumulation {row['accumulation']}"
            why = "takes the least energy (prices: --cards FILE)"
            if row["cost"] is not None:
                why = f"is the cheapest: {row['cost']:.4g}"
            lines.append(f"{row['stage']}: {words} {why}; {row['note']}")
    if any(not row["measurements"] for row in rows):
        lines.append(_TIMES)
    return "\n".join(lines)


def _speed(row: Row) -> str:
    speeds = (_rounded(row[f"samples_per_s{end}"]) for end in ("", "_low", "_high"))
    return "{} [{}, {}]".format(*speeds)


def _shown(row: Row, *, several: bool, priced: bool) -> Row:
    fits = row["micro_batch"] is not None
    found: Row = {"stage": row["stage"]} if several else {}
    cards = f"{row['workers']} x {row['card']}, {row['strategy']}"
    found |= {
        "card": row["card"] if row["workers"] == 1 else cards,
        "precision": row["precision"],
        "recompute": "yes" if row["gradient_checkpointing"] else "no",
        "batch": f"{row['micro_batch']} x {row['accumulation']}" if fits else "none",
        "peak": bytes_text(row["peak_bytes"] + row["context_bytes"]),
        "of": bytes_text(row["capacity_bytes"]),
    }
    if not fits:
        return found | dict.fromkeys(("samples/s", "time", "kWh"), "-")
    found["samples/s"] = _speed(row)
    found["time"] = duration(3600 * row["hours"])
    found["kWh"] = _rounded(row["energy_kwh"])
    if priced:
        found["cost"] = "-" if row["cost"] is None else f"{row['cost']:.4g}"
    if row.get("measured_samples_per_s"):
        found["measured"] = _rounded(row["measured_samples_per_s"])
    return found


def _rounded(value: float) -> str:
    """Return a number with three significant digits, below a million without an exponent."""
    return f"{float(f'{value:.3g}'):g}"
