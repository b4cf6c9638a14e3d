"""Building of a run directory's report from its tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from raypipe.config.matrix import value_text
from raypipe.config.validation import shorten
from raypipe.errors import ConfigError
from raypipe.redaction import shown_traceback
from raypipe.report.about import Declarations, Tables
from raypipe.report.comparison import of_point, point_name, points
from raypipe.report.formatting import cell
from raypipe.report.page import report_files
from raypipe.report.race import race_section
from raypipe.report.search import best_values, search_section
from raypipe.report.sections import Section
from raypipe.report.variants import variants_section
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_tables

log = logging.getLogger(__name__)

Sections = Callable[[Mapping[str, pd.DataFrame]], Sequence[Section]]


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
    own = of_point(tables, point) if point else tables
    files = report_files(
        tables,
        [
            search_section(tables),
            race_section(tables),
            variants_section(tables, point),
            *_own_sections(sections, own),
        ],
        title,
        {"experiment": title, **_facts(tables)},
        command,
        run_dir.read(run_dir.config).decode(),
        declared,
        run_dir,
    )
    for name, content in files.items():
        run_dir.write(f"{run_dir.report}/{name}", content)
    return f"{run_dir.report}/index.html"


def _point(tables: Tables, variant: str | None) -> dict[str, str] | None:
    """Return the point of a matrix that the experiment's sections show; None without a matrix."""
    names = dict(zip(map(point_name, found := points(tables)), found, strict=True))
    if variant is not None and variant not in names:
        listed = ", ".join(names) or "this run has no matrix"
        raise ConfigError(f"--variant {variant}: is not a point (there are: {shorten(listed)})")
    if variant is not None:
        return names[variant]
    best = {key: value_text(value) for key, value in best_values(tables).items()}
    preferred = (point for point in found if best.items() <= point.items())
    return next(preferred, next(iter(found), None))


def _own_sections(sections: Sections | None, tables: Tables) -> Sequence[Section]:
    """Return the experiment's sections; none, and a traceback in the log, if its code fails."""
    try:
        return sections(tables) if sections else []
    except Exception:
        message = "the report is without the experiment's sections\n%s"
        log.error(message, shown_traceback())  # noqa: TRY400
        return []


def _facts(tables: Tables) -> dict[str, str]:
    """Return the run's id, its start, its computing time and its nodes, as far as known."""
    stages, environment = tables.get("stages"), tables.get("environment")
    facts: dict[str, str] = {}
    if stages is not None and len(stages):
        facts["run"] = str(stages["run_id"].iloc[0])
        facts["started"] = cell("started_at", stages["started_at"].min())
        facts["computing"] = cell("duration_s", stages["duration_s"].sum())
    if environment is not None and len(environment):
        facts["nodes"] = ", ".join(environment["hostname"].unique())
    return facts
