"""Commands on a run directory: results and report."""

from __future__ import annotations

from typing import Annotated

import typer

from raypipe.cli.arguments import Existing, show

app = typer.Typer()


@app.command()
def results(
    run_dir: Existing,
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="e.g. studies, trials, failures.")
    ] = None,
) -> None:
    """Print a results table; without TABLE, list the tables."""
    from raypipe.commands import results as command

    show(command.table(run_dir, table))


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

    if unit is None:
        show(command.listing(run_dir))
    else:
        typer.echo(command.text(run_dir, unit))
