"""Commands on run directories: results, report, ls, show, replay, compare and watch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from raypipe.cli.arguments import Existing, print_frame, show_start
from raypipe.cli.completion import run_directories, tables
from raypipe.errors import ConfigError

app = typer.Typer()

_RESULTS_EXAMPLES = """\b
Examples:
  raypipe results RUN_DIR trials --columns trial_id,loss_final,samples_per_s --sort -loss_final
  raypipe results RUN_DIR steps --csv > steps.csv
  raypipe results RUN_DIR --sql 'select optimizer, avg(best_perplexity) from studies group by 1'
"""

_REPLAY_EXAMPLES = """\b
Examples:
  raypipe replay RUN_DIR
  raypipe replay RUN_DIR lda/20news/ga/0 --tolerance 1e-4
  raypipe replay RUN_DIR --all --kept-code
"""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog=_RESULTS_EXAMPLES)
def results(
    run_dir: Existing,
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="[TABLE]", help="e.g. studies, trials, failures.", autocompletion=tables
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Show these columns, in this order.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="[-]NAME,...", help="Sort by these columns; `-` before a name: largest first."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Rows at most; 0 for all. [default: 100 on a terminal, else all]"),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option(metavar="QUERY", help="Query all tables of the run by SQL (DuckDB) instead."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: all rows and columns.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of objects: all rows and columns.")
    ] = False,
) -> None:
    """Print a results table as wide as the terminal; without TABLE, list the tables."""
    from raypipe.commands import results as command
    from raypipe.commands.table_view import MOST_ROWS, terminal_width, view

    if as_csv and as_json:
        raise ConfigError("--csv and --json: give one of them")
    if sql is not None and table is not None:
        raise ConfigError("--sql: the query names its tables; leave TABLE out")
    run = command.existing(run_dir)
    if sql is not None:
        from raypipe.store.query import sql as run_query

        whole = run_query(run, sql)
    else:
        whole = command.table(run, table)
    rows = command.chosen(whole, columns, sort, limit or None)
    if as_csv or as_json:
        _write(command.to_csv(rows) if as_csv else command.to_json(rows))
        return
    width = terminal_width()
    empty: list[str] = []
    if table is None and sql is None:
        rows, empty = command.without_empty(rows)
    shown = rows
    if limit is None and sys.stdout.isatty():
        shown = rows.slice(0, MOST_ROWS)
    typer.echo(view(shown, width, whole=columns is not None or sql is not None or table is None))
    if empty:
        typer.echo(f"empty: {', '.join(empty)}")
    if len(shown) < len(rows):
        typer.echo(f"{len(shown):,} of {len(rows):,} rows; --limit 0 shows all")


@app.command()
def report(
    run_dir: Existing,
    variant: Annotated[
        str | None,
        typer.Option(help="The point of a matrix that the experiment's sections show."),
    ] = None,
) -> None:
    """Write report/index.html (one self-contained page) and the figures again."""
    from raypipe.commands import report as command

    typer.echo(command.report(run_dir, variant))


@app.command()
def logs(
    run_dir: Existing,
    unit: Annotated[
        str | None,
        typer.Argument(metavar="[UNIT]", help="A unit, task or trial, as the list shows it."),
    ] = None,
) -> None:
    """Print what a unit printed and why it failed; without UNIT, list all logs and failures."""
    from raypipe.commands import logs as command

    if unit is not None:
        typer.echo(command.text(run_dir, unit))
    elif len(found := command.listing(run_dir)):
        print_frame(found)
    else:
        typer.echo(f"{run_dir}: {command.NONE}")


@app.command()
def ls(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR]",
            help="A folder or URI with run directories in it, at any depth. "
            "[default: RAYPIPE_RUNS, else runs]",
            autocompletion=run_directories,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first: status, age, time, stages and key result."""
    from raypipe.commands import ls as command
    from raypipe.commands.request import RUNS
    from raypipe.commands.table_view import terminal_width

    location = directory or os.environ.get(RUNS) or "runs"
    found = command.runs(location)
    if as_json:
        typer.echo(json.dumps(command.as_json(found), indent=1))
    else:
        typer.echo(command.table(found, location, terminal_width()))


@app.command()
def show(
    run_dir: Existing,
    code: Annotated[
        bool,
        typer.Option("--code", help="Print the kept source code, with the units that ran with it."),
    ] = False,
) -> None:
    """Show what happened in a run: code, hardware, time, stages, results and failures."""
    from raypipe.commands.run_summary import opened

    if code:
        from raypipe.commands.code import code_text

        typer.echo(code_text(opened(run_dir)))
        return
    from raypipe.commands import show as command
    from raypipe.commands.table_view import terminal_width

    typer.echo(command.show(opened(run_dir), terminal_width()))


@app.command(epilog=_REPLAY_EXAMPLES)
def replay(
    run_dir: Existing,
    units: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[UNIT]...",
            help="Names of units, or what such names begin with, e.g. a stage. [default: a sample]",
        ),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Units of the sample, evenly spaced.")] = 3,
    every: Annotated[bool, typer.Option("--all", help="All units instead of a sample.")] = False,
    tolerance: Annotated[
        float, typer.Option(min=0, max=0.99, help="Relative difference that counts as equal.")
    ] = 1e-5,
    kept_code: Annotated[
        bool,
        typer.Option(
            "--kept-code", help="Run the code that RUN_DIR keeps, instead of the current code."
        ),
    ] = False,
) -> None:
    """Compute stored units again and compare: equal, within a tolerance, or what differs and why.

    They run in this process, without caches; RUN_DIR is only read. Columns that measure time,
    memory or speed are not compared. The exit status is 0 if all results are equal or within the
    tolerance, 1 otherwise.
    """
    show_start()
    from raypipe.commands import replay as command

    options: dict[str, Any] = {"sample": sample, "every": every, "tolerance": tolerance}
    found = command.replay(run_dir, units or (), kept_code=kept_code, **options)
    typer.echo(found)
    raise typer.Exit(int(not found.is_equal))


@app.command()
def compare(
    run_dirs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR...",
            help="Two run directories or more; the others are compared with the first.",
            autocompletion=run_directories,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show what differs between runs: configuration, environment and results."""
    from raypipe.commands import compare as command
    from raypipe.commands.run_summary import opened
    from raypipe.commands.table_view import terminal_width

    if len(run_dirs) < 2:
        raise ConfigError("compare: give two run directories or more")
    found = command.compare([opened(each) for each in run_dirs])
    if as_json:
        typer.echo(json.dumps(command.as_json(found), indent=1))
    else:
        typer.echo(command.text(found, terminal_width()))


@app.command()
def watch(run_dir: Existing) -> None:
    """Follow a run that goes on elsewhere, until it ends; Ctrl-C ends only the watching.

    The exit status is the run's: 0, 1 if it failed, 130 if it was interrupted.
    """
    from raypipe.commands import watch as command
    from raypipe.commands.run_summary import opened

    raise typer.Exit(command.watch(opened(run_dir)))


def _write(parts: Iterable[str]) -> None:
    for part in parts:
        sys.stdout.write(part)
