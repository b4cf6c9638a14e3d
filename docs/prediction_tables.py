"""Tables of predicted trainings, from the results of ``benchmarks/prediction.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "prediction"


def published_lines() -> Iterator[str]:
    """Yield the published memory and micro-batches next to the predicted ones."""
    yield "| training | card | published | predicted | largest: published | largest: predicted |"
    yield "|---|---|---|---|---|---|"
    for row in _rows("published"):
        name = f"{row['name']}, {row['precision']}, batch {row['micro_batch']}"
        cells = (name, row["card"], row["memory"], f"{row['predicted_gb']:.1f}")
        yield f"| {' | '.join(cells)} | {row['largest'] or '-'} | {_fitting(row)} |"


def profile_lines() -> Iterator[str]:
    """Yield the predicted memory of each GPU profile at its own batch."""
    yield "| configuration, profile | card | precision | batch | predicted | of | largest |"
    yield "|---|---|---|---|---|---|---|"
    for row in _rows("profiles"):
        batch = f"{row['micro_batch']} x {row['effective_batch'] // row['micro_batch']}"
        cells = (
            *(row["name"], row["card"], row["precision"], batch),
            *(f"{row['predicted_gb']:.1f}", f"{row['card_gb']:.1f}", _fitting(row)),
        )
        yield f"| {' | '.join(cells)} |"


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((_RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def _fitting(row: Mapping[str, Any]) -> str:
    """Return the largest micro-batch that is predicted, and the one with checkpointing."""
    plain, thrifty = row["predicted_largest"], row["predicted_largest_checkpointing"]
    text = "none" if plain is None else str(plain)
    return text if thrifty in (None, plain) else f"{text} ({thrifty} with checkpointing)"
