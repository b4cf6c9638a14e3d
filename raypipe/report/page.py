"""The report's page: building it from a run directory, and the sections that every run has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.matrix import value_text
from raypipe.config.validation import shorten
from raypipe.errors import ConfigError
from raypipe.redaction import shown_traceback
from raypipe.report.best import ADDED, Results, plain
from raypipe.report.formatting import cell, counted, heading
from raypipe.report.headlines import Declarations, RunResults
from raypipe.report.html import render
from raypipe.report.plots import rows
from raypipe.report.sections import (
    Bar,
    Code,
    Download,
    Fold,
    Part,
    Pill,
    Section,
    TableView,
    cells,
)
from raypipe.report.studies import (
    Searched,
    race_section,
    search_section,
    sweep_section,
    variants_section,
)
from raypipe.report.summary import summary_section, summary_tiles
from raypipe.report.tables import table_section
from raypipe.report.trainings import SWEEP, training_section
from raypipe.report.variants import Tables, of_point, point_name, points, variants_of
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Table, read_tables

log = logging.getLogger(__name__)

Sections = Callable[[Mapping[str, pd.DataFrame]], Sequence[Section]]

#: stages that are listed one by one, as long as there are no more
_MOST_STAGES = 40
_WORST = ("failed", "out_of_memory", "interrupted", "skipped")
_FILE = "config.yaml"
_KEPT = (
    "The folder `code` keeps the code that ran: `raypipe show --code` prints it, and "
    "`raypipe replay` computes results again."
)
#: columns that are the same in the rows of all nodes of a command
_OF_COMMAND = (*ADDED, "command", "started_at", "git_commit", "git_dirty", "hostname")


def build(
    run_dir: RunDirectory,
    title: str,
    sections: Sections | None,
    command: str,
    variant: str | None = None,
    declared: Declarations | None = None,
) -> str:
    """Write ``report/index.html`` and ``report/figures/``; return the path of the page.

    ``sections`` returns the experiment's own sections from the tables; ``title`` is its name, and
    ``command`` the one that continues this run. ``sections`` show one point of a matrix: that of
    ``variant``, by default the best one of a search, otherwise the first.
    ``declared`` are its tables and metrics, which the summary and the tables' sections are made of.

    Raises:
        ConfigError: ``variant`` names no point.

    """
    tables = read_tables(run_dir)
    point = _point(tables, variant)
    own: Sequence[Section] = ()
    try:
        own = sections(of_point(tables, point) if point else tables) if sections else ()
    except Exception:
        message = "the report is without the experiment's sections\n%s"
        log.error(message, shown_traceback())  # noqa: TRY400
    facts = {"experiment": title, **_facts(tables)}
    configuration = run_dir.read(run_dir.config).decode()
    about = RunResults(
        tables, title, command, configuration, declared or Declarations(), own, run_dir
    )
    for name, content in page_files(about, facts, point).items():
        run_dir.write(f"{run_dir.report}/{name}", content)
    return f"{run_dir.report}/index.html"


def _point(tables: Tables, variant: str | None) -> dict[str, str] | None:
    """Return the point of a matrix that the experiment's sections show; None without a matrix."""
    names = {point_name(point): point for point in points(tables)}
    if variant is not None and variant not in names:
        there = ", ".join(names) or "this run has no matrix"
        raise ConfigError(f"--variant {variant}: is not a point (there are: {shorten(there)})")
    if variant is not None:
        return names[variant]
    search = Searched.of(tables)
    best = {} if search is None else {k: value_text(v) for k, v in search.best.items()}
    preferred = (point for point in names.values() if best.items() <= point.items())
    return next(preferred, next(iter(names.values()), None))


def _facts(tables: Tables) -> dict[str, str]:
    """Return the run's id, its start, its computing time and its nodes, as far as known."""
    stages, environment = rows(tables, "stages"), rows(tables, "environment")
    facts: dict[str, str] = {}
    if stages is not None:
        facts["run"] = str(stages["run_id"].iloc[0])
        facts["started"] = cell("started_at", stages["started_at"].min())
        facts["computing"] = cell("duration_s", stages["duration_s"].sum())
    if environment is not None:
        facts["nodes"] = ", ".join(environment["hostname"].unique())
    return facts


def page_files(
    about: RunResults, facts: Mapping[str, str], shown: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Return the content of the report's files by name, ``index.html`` last.

    A section whose tables are missing or empty is left out, and so is that of a table that a
    section of the experiment covers. Tables with headline numbers come first.

    Args:
        about: the run.
        facts: shown below the title.
        shown: the point of a matrix that the experiment's own sections show.

    Raises:
        ValueError: two plots share a name.

    """
    stages = rows(about.tables, "stages")
    status = "" if stages is None else _worst(stages["status"], _WORST[:-1])
    failures, others = _asked(about)
    about = replace(about, tables={**about.tables, **failures})
    tables, own = about.tables, about.sections
    covered = {name for section in own for name in section.covers if section.parts}
    free = [results for results in about.results if results.table.name not in covered]
    said = summary_tiles(about)
    swept = sweep_section(tables, about.sweeps)
    sections = [
        summary_section(about),
        _failures(tables, others, recovered=status == "succeeded"),
        *([swept] if about.only_swept else []),
        *(table_section(results, said) for results in free if results.headlines),
        search_section(tables),
        race_section(tables),
        variants_section(tables, shown, list(about.trained.values())),
        *own,
        *(table_section(results, said) for results in free if not results.headlines),
        training_section(tables, about.evaluations),
        _predictions(tables),
        *([] if about.only_swept else [swept]),
        _stages(stages),
        _environment(tables),
        _repetition(about),
        _listing(tables),
    ]
    return render(about.title, Pill.of_status(status) if status else None, facts, sections)


def _worst(statuses: pd.Series[Any], order: Sequence[str]) -> str:
    present = set(statuses.astype(str))
    return next((status for status in order if status in present), "succeeded")


def _asked(about: RunResults) -> tuple[dict[str, pd.DataFrame], int]:
    """Return the failures of units that the newest command asked for, and the number of others."""
    failures = rows(about.tables, "failures")
    if failures is None or about.declared.asked is None or variants_of(about.tables):
        return {}, 0
    own = failures["unit"].isin(list(about.declared.asked()))
    return {"failures": failures[own]}, int((~own).sum())


def _failures(tables: Tables, others: int, *, recovered: bool) -> Section:
    """Return the failed attempts; out of memory is an expected outcome of a sweep's trial.

    ``others`` counts those of units that are not asked for any more.
    """
    css = "alert recovered" if recovered else "alert"
    stored = f"The table failures has {others} more, of units that are not asked for any more."
    texts = [stored] if others else []
    failures = rows(tables, "failures")
    if failures is not None:
        expected = (failures["stage"] == SWEEP) & (failures["kind"] == "out_of_memory")
        failures = failures[~expected]
    if failures is None or failures.empty:
        return Section("Failures", texts, css="alert recovered")
    kinds = failures["kind"].astype(str).str.replace("_", " ")
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.value_counts().items())
    end = " Every stage succeeded in the end." if recovered else ""
    text = " ".join([f"{counted(len(failures), 'attempt')} failed: {counts}.{end}", *texts])
    failures = failures.assign(
        kind=cells(Pill(kind, "bad") for kind in kinds),
        message=cells(Code(text) for text in failures["message"].fillna("").astype(str)),
    )
    columns = ["kind", "message", "unit", "stage", "attempt"]
    view = TableView(failures, columns, "Failed attempts")
    return Section("Failures", [text, Fold("Failed attempts", [view]) if recovered else view], css)


def _stages(stages: pd.DataFrame | None) -> Section:
    """Return the stages; those of a large matrix by name, with the variants in a fold."""
    if stages is None:
        return Section("Stages", [])
    started = pd.to_datetime(stages["started_at"], utc=True)
    stages = stages.assign(started_at=started).sort_values("started_at", kind="stable")
    stages["ended"] = stages["started_at"] + pd.to_timedelta(stages["duration_s"], unit="s")
    columns = ["status", "duration_s", "timeline", "started_at", "device"]
    if len(stages) <= _MOST_STAGES:
        view = TableView(_with_timeline(stages), ["stage", *columns, "gpu_peak_bytes"], "Stages")
        return Section("Stages", [view])
    by_name = stages.groupby("stage", sort=False)
    together = by_name.agg(
        variants=("stage", "size"),
        status=("status", lambda statuses: _worst(statuses, _WORST)),
        duration_s=("duration_s", "sum"),
        started_at=("started_at", "min"),
        ended=("ended", "max"),
        device=("device", "first"),
    ).reset_index()
    every = TableView(_with_timeline(stages), ["stage", "variant", *columns], "All stages")
    view = TableView(_with_timeline(together), ["stage", "variants", *columns], "Stages by name")
    return Section("Stages", [view, Fold(f"All {len(stages)} stages", [every])])


def _with_timeline(stages: pd.DataFrame) -> pd.DataFrame:
    """Return stages with their statuses as pills, and their times as bars."""
    first = stages["started_at"].min()
    starts, ends = ((stages[name] - first).dt.total_seconds().to_numpy(float)
                    for name in ("started_at", "ended"))  # fmt: skip
    last = float(np.max(np.nan_to_num(ends))) or 1.0
    shares = 100 * np.column_stack([starts, ends - starts]) / last
    return stages.assign(
        status=cells(Pill.of_status(str(status)) for status in stages["status"]),
        timeline=cells(Bar(*share) if np.isfinite(share).all() else "" for share in shares),
    )


def _predictions(tables: Tables) -> Section:
    """Return the predictions of ``raypipe fit --card``, which are no results of the run."""
    table = Table("card_predictions", "a training on a card, predicted without it")
    found = tables.get(table.name, pd.DataFrame())
    return table_section(Results(table, plain(found), ["card", "precision", "stage"]))


def _environment(tables: Tables) -> Section:
    """Return the environment of the last command of a run, and the earlier commands to open.

    The summary has the last command itself.
    """
    environment = rows(tables, "environment")
    if environment is None:
        return Section("Environment", [])
    at = pd.to_datetime(environment["started_at"], utc=True, format="ISO8601")
    known = environment.assign(started_at=at).sort_values("started_at", kind="stable")
    folds = [_command(nodes) for _, nodes in known.groupby("command_id", sort=False)]
    *earlier, last = folds
    shown = [part for part in last.parts if not isinstance(part, Code)]
    return Section("Environment", [last.title, *shown, *earlier])


def _command(nodes: pd.DataFrame) -> Fold:
    """Return a command, with a column per node and a row per property or package."""
    about = nodes.iloc[0]
    commit = "no commit" if pd.isna(about["git_commit"]) else f"commit {about['git_commit']}"
    changes = " with uncommitted changes" if nodes["git_dirty"].eq(True).any() else ""
    started = cell("started_at", about["started_at"])
    names = [str(n) for n in nodes if n not in _OF_COMMAND and nodes[n].notna().any()]
    table = pd.DataFrame({"property": [heading(name) for name in names]})
    for _, node in nodes.drop_duplicates("hostname").iterrows():
        table[str(node["hostname"])] = [cell(name, node[name]) for name in names]
    view = TableView(table, list(table.columns), "Nodes and packages")
    return Fold(f"{started}, {commit}{changes}", [Code(str(about["command"])), view])


def _repetition(about: RunResults) -> Section:
    """Return the commands that repeat a run elsewhere, and what they need."""
    parts: list[Part] = []
    if about.configuration:
        commands = [f"raypipe run {_FILE} --run-dir repeated"]
        notes = []
        if len(about.nodes):
            node = about.nodes.iloc[0]
            if isinstance(commit := node.get("git_commit"), str):
                commands.insert(0, f"git checkout {commit.rstrip('+')}")
                if node.get("git_dirty") in (True,):
                    notes = [f"Files differed from this commit when the run started. {_KEPT}"]
            else:
                notes = [f"The run did not start in a git repository. {_KEPT}"]
        parts += [
            "The configuration below has every setting, also those of the profile. Save it, then:",
            Code("\n".join(commands)),
            *notes,
            Download(_FILE, about.configuration),
        ]
    if about.command and about.command != about.asked_command:  # which the summary shows
        parts += ["To continue this run, or compute more in it:", Code(about.command)]
    if about.configuration:
        parts.append(Fold("Resolved configuration", [Code(about.configuration)]))
    return Section("How to repeat", parts)


def _listing(tables: Tables) -> Section:
    """Return the names, sizes and columns of all tables of the run."""
    written = [(name, table) for name, table in sorted(tables.items()) if not table.empty]
    if not written:
        return Section("Tables", [])
    listing = pd.DataFrame(
        {
            "table": [f"results/{name}" for name, _ in written],
            "rows": [len(table) for _, table in written],
            "columns": [", ".join(str(n) for n in table if n not in ADDED) for _, table in written],
        }
    )
    view = TableView(listing, list(listing.columns), "Tables of this run")
    return Section("Tables", ["Parquet files, readable with pandas, polars or DuckDB.", view])
