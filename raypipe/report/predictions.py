"""The section of predictions: memory and speed on cards, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from raypipe.report.plots import rows
from raypipe.report.sections import Section, TableView, cells

_COLUMNS = (
    "stage", "card", "workers", "strategy", "precision", "gradient_checkpointing", "micro_batch",
    "accumulation", "peak_bytes", "measured_peak_bytes", "capacity_bytes", "samples_per_s",
    "interval", "measured_samples_per_s", "hours", "energy_kwh", "cost", "note",
)  # fmt: skip


def predictions_section(tables: Mapping[str, pd.DataFrame]) -> Section:
    """Return the predictions of ``--card``; without any, a section without parts."""
    found = rows(tables, "card_predictions", ["stage", "card", "precision"])
    if found is None or found.empty:
        return Section("Predictions", [])
    low, high = found["samples_per_s_low"], found["samples_per_s_high"]
    interval = ["" if pd.isna(a) else f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)]
    found = found.assign(interval=cells(interval))
    text = (
        "Predicted from the model on a machine without these cards. Times are of optimizer steps "
        "alone."
    )
    return Section("Predictions", [text, TableView(found, _COLUMNS, "Predictions")])
