"""The sections of the report that every run has, and the report's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from raypipe.report.about import About, Declarations, Results, Tables
from raypipe.report.closing_sections import (
    environment_section,
    predictions_section,
    repetition_section,
)
from raypipe.report.comparison import variants_of
from raypipe.report.html import render
from raypipe.report.plots import rows
from raypipe.report.sections import (
    Bar,
    Code,
    Fold,
    Pill,
    Section,
    TableView,
    Tile,
    cells,
)
from raypipe.report.summary import summary_section, summary_tiles
from raypipe.report.sweep_section import sweep_section
from raypipe.report.sweep_trials import SWEEP
from raypipe.report.table_section import table_section
from raypipe.report.table_shape import ADDED
from raypipe.report.training_section import training_section
from raypipe.store.run_directory import RunDirectory

#: stages that are listed one by one, as long as there are no more
_MOST_STAGES = 40
_BAD = ("failed", "out_of_memory", "interrupted", "skipped")


def report_files(
    tables: Tables,
    sections: Sequence[Section],
    title: str,
    facts: Mapping[str, str],
    command: str = "",
    configuration: str = "",
    declared: Declarations | None = None,
    directory: RunDirectory | None = None,
) -> dict[str, bytes]:
    """Return the content of the report's files by name, ``index.html`` last.

    A section whose tables are missing or empty is left out.

    Args:
        tables: of the run.
        sections: the experiment's own, and those of a matrix; tables that they cover have no
            separate section. Those with headline numbers come before them.
        title: the experiment.
        facts: shown below the title.
        command: continues this run.
        configuration: the resolved configuration, as YAML.
        declared: the experiment's tables and metrics.
        directory: of the run, to tell missing numbers from NaN.

    Raises:
        ValueError: two plots share a name.

    """
    status = _status(tables)
    declared = declared or Declarations()
    failures, others = _asked(tables, declared)
    found = {**tables, **failures}
    about = About(found, title, command, configuration, declared, sections, directory)
    said = summary_tiles(about)
    covered = {name for section in sections for name in section.covers if section.parts}
    shown = [results for results in about.results if results.table.name not in covered]
    return render(
        title,
        Pill.of_status(status) if status else None,
        facts,
        [
            summary_section(about),
            _failures(about.tables, others, recovered=status == "succeeded"),
            *([sweep_section(tables)] if about.only_swept else []),
            *(_table(results, said) for results in shown if results.headlines),
            *sections,
            *(_table(results, said) for results in shown if not results.headlines),
            training_section(about),
            predictions_section(tables),
            *([] if about.only_swept else [sweep_section(tables)]),
            _stages(tables),
            environment_section(tables),
            repetition_section(about),
            _tables(tables),
        ],
    )


def _table(results: Results, said: Sequence[Tile]) -> Section:
    return table_section(results.table, results.rows, results.axes, said=said)


def _status(tables: Tables) -> str:
    """Return the worst status of any stage, or an empty text if none is recorded."""
    stages = rows(tables, "stages")
    if stages is None:
        return ""
    return _worst(stages["status"], ("failed", "out_of_memory", "interrupted"))


def _worst(statuses: pd.Series, order: Sequence[str]) -> str:
    present = set(statuses.astype(str))
    return next((status for status in order if status in present), "succeeded")


def _asked(tables: Tables, declared: Declarations) -> tuple[dict[str, pd.DataFrame], int]:
    """Return the failures of units that the newest command asked for, and the number of others."""
    failures = tables.get("failures")
    if failures is None or failures.empty or declared.asked is None or variants_of(tables):
        return {}, 0
    own = failures["unit"].isin(list(declared.asked()))
    return {"failures": failures[own]}, int((~own).sum())


def _failures(tables: Tables, others: int, *, recovered: bool) -> Section:
    """Return the failed attempts; out of memory is an expected outcome of a sweep's trial.

    ``others`` counts those of units that are not asked for any more.
    """
    failures = rows(tables, "failures")
    if failures is not None:
        expected = (failures["stage"] == SWEEP) & (failures["kind"] == "out_of_memory")
        failures = failures[~expected]
    stored = (
        f"The table failures has {others} more, of units that are not asked for any more."
        if others
        else ""
    )
    if failures is None or failures.empty:
        return Section("Failures", [stored] if stored else [], css="alert recovered")
    kinds = failures["kind"].astype(str).str.replace("_", " ")
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.value_counts().items())
    attempts = "1 attempt" if len(failures) == 1 else f"{len(failures)} attempts"
    end = " Every stage succeeded in the end." if recovered else ""
    failures = failures.assign(
        kind=cells(Pill(kind, "bad") for kind in kinds),
        message=cells(Code(text) for text in failures["message"].fillna("").astype(str)),
    )
    columns = ["kind", "message", "unit", "stage", "attempt"]
    view = TableView(failures, columns, "Failed attempts")
    return Section(
        "Failures",
        [
            " ".join(filter(None, [f"{attempts} failed: {counts}.{end}", stored])),
            Fold("Failed attempts", [view]) if recovered else view,
        ],
        css="alert recovered" if recovered else "alert",
    )


def _stages(tables: Tables) -> Section:
    """Return the stages; those of a large matrix by name, with the variants in a fold."""
    stages = rows(tables, "stages")
    if stages is None:
        return Section("Stages", [])
    started = pd.to_datetime(stages["started_at"], utc=True)
    stages = stages.assign(started_at=started).sort_values("started_at", kind="stable")
    stages["ended"] = stages["started_at"] + pd.to_timedelta(stages["duration_s"], unit="s")
    columns = ["stage", "status", "duration_s", "timeline", "started_at", "device"]
    if len(stages) <= _MOST_STAGES:
        listed = _with_timeline(stages)
        return Section("Stages", [TableView(listed, [*columns, "gpu_peak_bytes"], "Stages")])
    grouped = [_together(of_name) for _, of_name in stages.groupby("stage", sort=False)]
    several = [*columns[:1], "variants", *columns[1:]]
    every = TableView(_with_timeline(stages), [columns[0], "variant", *columns[1:]], "All stages")
    return Section(
        "Stages",
        [
            TableView(_with_timeline(pd.DataFrame(grouped)), several, "Stages by name"),
            Fold(f"All {len(stages)} stages", [every]),
        ],
    )


def _together(variants: pd.DataFrame) -> dict[str, Any]:
    """Return one row for the variants of a stage: their worst status, and their whole time."""
    return {
        "stage": variants["stage"].iloc[0],
        "variants": len(variants),
        "status": _worst(variants["status"], _BAD),
        "duration_s": variants["duration_s"].sum(),
        "started_at": variants["started_at"].min(),
        "ended": variants["ended"].max(),
        "device": variants["device"].dropna().iloc[0] if variants["device"].notna().any() else None,
    }


def _with_timeline(stages: pd.DataFrame) -> pd.DataFrame:
    """Return stages with their statuses as pills, and their times as bars."""
    first = stages["started_at"].min()
    starts = (stages["started_at"] - first).dt.total_seconds().to_numpy(float)
    ends = (stages["ended"] - first).dt.total_seconds().to_numpy(float)
    last = float(np.max(np.nan_to_num(ends))) or 1.0
    shares = 100 * np.column_stack([starts, ends - starts]) / last
    return stages.assign(
        status=cells(Pill.of_status(str(status)) for status in stages["status"]),
        timeline=cells(Bar(*share) if np.isfinite(share).all() else "" for share in shares),
    )


def _tables(tables: Tables) -> Section:
    written = {name: table for name, table in sorted(tables.items()) if not table.empty}
    if not written:
        return Section("Tables", [])
    listing = pd.DataFrame(
        {
            "table": [f"results/{name}" for name in written],
            "rows": [len(table) for table in written.values()],
            "columns": [
                ", ".join(str(name) for name in table.columns if name not in ADDED)
                for table in written.values()
            ],
        }
    )
    return Section(
        "Tables",
        [
            "Parquet files, readable with pandas, polars or DuckDB.",
            TableView(listing, list(listing.columns), "Tables of this run"),
        ],
    )
