"""Command line: parse arguments, return the exit status."""

from __future__ import annotations

import atexit
import gc
import platform
import signal
import sys
from typing import Annotated

import typer

from raypipe.cli import experiments, machine, runs
from raypipe.errors import ConfigError, Interrupted, UnitError
from raypipe.redaction import without_credentials

app = typer.Typer(
    name="raypipe",
    help="Run experiments in parallel on Ray: one experiment, one YAML, every result in Parquet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for commands in (experiments, machine, runs):
    app.add_typer(commands.app)


def _show_version(asked: bool) -> None:
    if asked:
        from raypipe.provenance import package_version

        versions = [
            f"raypipe {package_version('raypipe-runner') or 'unknown'}",
            f"Python {platform.python_version()}",
            *(f"{name} {package_version(name) or 'missing'}" for name in ("torch", "ray")),
        ]
        typer.echo(", ".join(versions))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the versions of raypipe, Python, torch and Ray.",
        ),
    ] = False,
) -> None:
    del version


def _spread_stages(arguments: list[str]) -> list[str]:
    """Turn ``--only A B`` into ``--only A --only B``: click's options take one value."""
    spread: list[str] = []
    further = False
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        named = not argument.startswith("-") and "=" not in argument
        further = named and (before == "--only" or further)
        spread += ["--only", argument] if further and before != "--only" else [argument]
    return spread


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise Interrupted


def _ignore_interrupts() -> None:
    """Let the interpreter exit with its status: everything is said, and another Ctrl-C is late."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Run the command line; a configuration error is one message and exit status 2.

    SIGTERM ends a command cleanly, as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        app(_spread_stages(sys.argv[1:]), prog_name="raypipe")
    except ConfigError as error:
        print(f"raypipe: {without_credentials(str(error))}", file=sys.stderr)
        sys.exit(2)
    except UnitError as error:
        print(f"raypipe: {without_credentials(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # the last callback is the first to run: before Ray stops its processes, which takes seconds
        atexit.register(_ignore_interrupts)
        gc.freeze()  # the exit would collect among all objects for a second
