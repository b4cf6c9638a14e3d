"""The report's page: building it from a run directory, and the sections that every run has."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from raypipe.config.matrix import value_text
from raypipe.config.validation import shorten
from raypipe.errors import ConfigError
from raypipe.redaction import shown_traceback
from raypipe.report.best import Tables
from raypipe.report.comparison import of_point, point_name, points
from raypipe.report.first_screen import summary_section
from raypipe.report.formatting import counted
from raypipe.report.parts import (
    Code,
    Download,
    Fold,
    Part,
    Pill,
    Section,
    TableView,
    cells,
    render,
)
from raypipe.report.plots import rows, style
from raypipe.report.run_results import Declarations, RunResults
from raypipe.report.studies import (
    Searched,
    race_section,
    search_section,
    sweep_section,
    variants_section,
)
from raypipe.report.tables import table_section
from raypipe.report.trainings import SWEEP, training_section
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import ADDED, read_tables

log = logging.getLogger(__name__)

Sections = Callable[[Mapping[str, pd.DataFrame]], Sequence[Section]]

_WORST = ("failed", "out_of_memory", "interrupted")
_FILE = "config.yaml"
_KEPT = (
    "The folder `code` keeps the code that ran: `raypipe show --code` prints it, and "
    "`raypipe replay` computes results again."
)


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
    configuration = run_dir.read(run_dir.config).decode()
    own_tables = declared or Declarations()
    run = RunResults(tables, title, command, configuration, own_tables, own, run_dir)
    for name, content in page_files(run, point).items():
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
    search, best = Searched.of(tables), {}
    for point in search.front["point"].head(1) if search is not None else ():
        best = {key: value_text(value) for key, value in json.loads(point).items()}
    preferred = (point for point in names.values() if best.items() <= point.items())
    return next(preferred, next(iter(names.values()), None))


@style()
def page_files(run: RunResults, shown: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """Return the content of the report's files by name, ``index.html`` last.

    A section whose tables are missing or empty is left out, and so is that of a table that a
    section of the experiment covers. Tables with headline numbers come first.

    Args:
        run: the run.
        shown: the point of a matrix that the experiment's own sections show.

    Raises:
        ValueError: two plots share a name.

    """
    tables, stages = run.tables, rows(run.tables, "stages")
    statuses = [] if stages is None else list(stages["status"])
    worst = next((status for status in _WORST if status in statuses), "succeeded")
    covered = {name for section in run.sections for name in section.covers if section.parts}
    free = [results for results in run.results if results.table.name not in covered]
    sections = [
        summary_section(run),
        _failures(run, recovered=worst == "succeeded"),
        sweep_section(tables, run.sweeps),
        *(table_section(results) for results in free if results.headlines),
        search_section(tables),
        race_section(tables),
        variants_section(tables, shown, run.trained),
        *run.sections,
        *(table_section(results) for results in free if not results.headlines),
        training_section(tables, run.evaluations),
        _stages(run),
        _environment(run),
        _repetition(run),
    ]
    status = Pill.of_status(worst) if statuses else None
    return render(run.title, status, sections)


def _failures(run: RunResults, *, recovered: bool) -> Section:
    """Return the failed attempts; out of memory is an expected outcome of a sweep's trial."""
    texts, failures = [], run.failures
    if others := len(run.tables.get("failures", ())) - len(failures):
        texts = [f"The table failures has {others} more, of units that are not asked for any more."]
    failures = failures[(failures["stage"] != SWEEP) | (failures["kind"] != "out_of_memory")]
    if failures.empty:
        return Section("Failures", texts, "alert recovered")
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
    css = "alert recovered" if recovered else "alert"
    return Section("Failures", [text, Fold("Failed attempts", [view]) if recovered else view], css)


def _stages(run: RunResults) -> Section:
    if (stages := rows(run.tables, "stages")) is None:
        return Section("Stages", [])
    pills = cells(Pill.of_status(str(status)) for status in stages["status"])
    ordered = stages.assign(status=pills).sort_values("started_at", kind="stable")
    variant = ["variant"] if run.varied else []
    columns = ["stage", *variant, "status", "duration_s", "started_at", "device", "gpu_peak_bytes"]
    return Section("Stages", [TableView(ordered, columns, "Stages")])


def _environment(run: RunResults) -> Section:
    hidden = {*ADDED, "command"}  # which the summary shows
    columns = [name for name in run.nodes if name not in hidden]
    text = "Of the last command; the table environment has the nodes of all commands."
    view = TableView(run.nodes, columns, "Nodes and packages", caption=text)
    return Section("Environment", [view])


def _repetition(run: RunResults) -> Section:
    """Return the commands that repeat a run elsewhere, and what they need."""
    parts: list[Part] = []
    if run.configuration:
        commands, notes = [f"raypipe run {_FILE} --run-dir repeated"], []
        for node in run.nodes.head(1).to_dict("records"):
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
            Download(_FILE, run.configuration),
            Fold("Resolved configuration", [Code(run.configuration)]),
        ]
    if run.command and run.command != run.asked_command:  # which the summary shows
        parts += ["To continue this run, or compute more in it:", Code(run.command)]
    return Section("How to repeat", parts)
