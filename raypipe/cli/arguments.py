"""Arguments that several commands share, and the printing of tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from raypipe.cli import completion
from raypipe.errors import ConfigError
from raypipe.redaction import printable, without_credentials

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="The YAML file of the experiment, or the name of one that comes with raypipe "
        "(`raypipe run --list`).",
        autocompletion=completion.configurations,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override any key by its dotted path, e.g. lda.runs=2 "
        "train_small.training.precision=bf16 'lda.datasets=[20news,agnews]'.",
        autocompletion=completion.keys,
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option(
        help="Where results go; the same directory again continues that run. "
        "A path or a URI (s3://...). [default: runs/<experiment>/<timestamp>-<id>]",
        autocompletion=completion.run_directories,
    ),
]
Profile = Annotated[
    str, typer.Option(help="auto (by the hardware), cpu, gpu, or a name from `profiles:`.")
]
Address = Annotated[
    str | None, typer.Option(help="A Ray cluster to use. [default: start one here]")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STAGE...",
        help="Run these stages and what they need.",
        autocompletion=completion.stages,
    ),
]
Matrix = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=[VALUE,...]",
        help="Run every combination of these values in one run directory; the same as "
        "matrix.KEY=[...]. `--matrix runs=5` repeats with five seeds.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Run a matrix of more than 10,000 points.")]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time-budget",
        metavar="TIME",
        help="End in order before this time is over, with checkpoints of running trainings: 2h, "
        "90m, 3600s, or 1:30:00 as SLURM writes it. The same command continues.",
    ),
]
Local = Annotated[
    bool,
    typer.Option(
        "--local",
        help="Run everything in this one process, without Ray, so that breakpoint() and pdb "
        "work; the results are the same.",
    ),
]
Existing = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR",
        help="The directory of a run.",
        autocompletion=completion.run_directories,
    ),
]


CardsPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="With --card: number of cards. [default: scaling.workers]"),
]
Cards = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="With --card: further cards and prices. [default: RAYPIPE_CARDS]"
    ),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        metavar="PRECISION",
        help="With --card: predict this precision only; may be repeated. [default: each that the "
        "card supports]",
    ),
]
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--gradient-checkpointing/--no-gradient-checkpointing",
        help="With --card: predict with gradient checkpointing, or without it, alone. [default: "
        "without, and with it where the effective batch does not fit at once]",
    ),
]


def need_card(card: str | None, options: Mapping[str, Any]) -> None:
    """Reject options of a prediction without its card."""
    for name, value in options.items():
        if card is None and value is not None:
            raise ConfigError(f"--{name}: needs --card: the card to predict for")


def with_matrix(overrides: list[str] | None, matrix: list[str] | None) -> list[str]:
    """Return the overrides together with those of ``--matrix``."""
    return [*(overrides or []), *(f"matrix.{text}" for text in matrix or [])]


def show_start() -> None:
    """Show on a terminal that the command has started, until its first line takes the place.

    The imports that follow take a second or more. The text is shorter than any first line.
    """
    if sys.stdout.isatty():
        print("raypipe: loading", end="\r", flush=True)


def print_frame(frame: Any) -> None:
    """Print a whole table on the terminal."""
    text = frame.to_string(index=False, max_colwidth=60) if len(frame) else "(no rows)"
    typer.echo(printable(without_credentials(text), keep="\n"))
