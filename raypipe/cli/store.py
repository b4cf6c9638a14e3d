"""Commands on the shared store: ls, verify and prune."""

from __future__ import annotations

from typing import Annotated

import typer

from raypipe.cli.arguments import print_frame

Store = Annotated[
    str | None,
    typer.Argument(metavar="[LOCATION]", help="A path or URI. [default: RAYPIPE_STORE]"),
]

app = typer.Typer(
    help="List, verify and prune the results that run directories share.", no_args_is_help=True
)


@app.command("ls")
def store_ls(location: Store = None) -> None:
    """List the entries: stage, who computed it, where, when, and its size."""
    from raypipe.commands import store as command

    print_frame(command.entries(location))


@app.command("verify")
def store_verify(location: Store = None) -> None:
    """Read everything and compare the checksums; exit status 1 if something is damaged."""
    from raypipe.commands import store as command

    text, whole = command.verify(location)
    typer.echo(text)
    raise typer.Exit(int(not whole))


@app.command("prune")
def store_prune(
    older_than: Annotated[
        str, typer.Option(help="Age, such as 12h, 30d or 8w.", show_default=False)
    ],
    location: Store = None,
) -> None:
    """Remove what was stored longer ago, damaged entries, and files that no entry refers to."""
    from raypipe.commands import store as command

    typer.echo(command.prune(location, older_than))
