from __future__ import annotations

import pandas as pd

from raypipe.report.closing_sections import predictions_section
from raypipe.report.sections import TableView

ROW = {
    "stage": "train", "card": "L4", "precision": "bf16", "micro_batch": 8, "peak_bytes": 2**30,
    "samples_per_s": 100.0, "samples_per_s_low": 50.0, "samples_per_s_high": 150.0,
    "measured_samples_per_s": 90.0, "cost": None, "note": "predicted, uncalibrated",
}  # fmt: skip


def test_predictions_stand_next_to_measurements() -> None:
    none = {**ROW, "samples_per_s_low": None, "samples_per_s_high": None}
    section = predictions_section({"card_predictions": pd.DataFrame([ROW, none])})
    view = section.parts[1]
    assert isinstance(view, TableView)
    assert list(view.rows["interval"].astype(str)) == ["50 to 150", ""]
    columns = view.visible_columns
    assert columns.index("samples_per_s") < columns.index("measured_samples_per_s")
    assert "cost" not in columns


def test_a_run_without_predictions_has_no_section() -> None:
    assert predictions_section({}).parts == []
