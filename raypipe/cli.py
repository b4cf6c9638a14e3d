"""Command line: parse arguments, return the exit status."""

from __future__ import annotations

import gc
import json
import signal
import sys
from typing import Annotated, Any

import typer

from raypipe.errors import ConfigError, UnitError
from raypipe.redaction import without_credentials

app = typer.Typer(
    name="raypipe",
    help="Run experiments in parallel on Ray: one experiment, one YAML, every result in Parquet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_EXAMPLES = """\b
Examples:
  raypipe run configs/quickstart.yaml
  raypipe run configs/pabbo_lda.yaml lda.runs=2 --run-dir runs/mine --only lda
"""

_SWEEP_EXAMPLES = """\b
Examples:
  raypipe sweep configs/quickstart.yaml
  raypipe sweep configs/pabbo_lda.yaml 'sweep.axes.training.micro_batch=[4,8,16]' \\
    --run-dir runs/mine --write configs/mine.yaml
"""

_FIT_EXAMPLES = """\b
Examples:
  raypipe fit configs/pabbo_lda.yaml
  raypipe fit configs/lm_pretrain.yaml train.training.gradient_checkpointing=true
"""

_SUBMIT_EXAMPLES = """\b
Examples:
  raypipe submit configs/pabbo_lda.yaml --address http://HEAD:8265 --run-dir /shared/runs/mine
  raypipe submit configs/lm_pretrain.yaml train.training.steps=5000 --no-follow \\
    --address http://HEAD:8265 --run-dir s3://BUCKET/runs/lm
"""

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file of the experiment.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override any key by its dotted path, e.g. lda.runs=2 "
        "train_small.training.precision=bf16 'lda.datasets=[20news,agnews]'.",
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option(
        help="Where results go; the same directory again continues that run. "
        "A path or a URI (s3://...). [default: runs/<experiment>/<timestamp>-<id>]"
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
    typer.Option(metavar="STAGE...", help="Run these stages and what they need."),
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
Store = Annotated[
    str | None,
    typer.Argument(metavar="[LOCATION]", help="A path or URI. [default: RAYPIPE_STORE]"),
]
Existing = Annotated[str, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")]


@app.command(epilog=_EXAMPLES)
def run(
    config: Config,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    profile: Profile = "auto",
    only: Only = None,
    matrix: Matrix = None,
    address: Address = None,
    time_budget: TimeLimit = None,
    yes: Yes = False,
    strict_code: Annotated[
        bool,
        typer.Option(
            "--strict-code",
            help="Refuse to continue a run whose experiment's source code changed.",
        ),
    ] = False,
) -> None:
    """Run an experiment; finished work is kept and never repeated."""
    from raypipe.commands import run as command
    from raypipe.commands.request import Request

    given = _with_matrix(overrides, matrix), run_dir, profile, only or [], address
    further: dict[str, Any] = {"strict_code": strict_code, "yes": yes, "time_budget": time_budget}
    raise typer.Exit(command.run(Request("run", config, *given, **further)))


@app.command(epilog=_SUBMIT_EXAMPLES)
def submit(
    config: Config,
    address: Annotated[
        str,
        typer.Option(help="The cluster's dashboard, e.g. http://HEAD:8265.", show_default=False),
    ],
    run_dir: Annotated[
        str,
        typer.Option(
            help="Where results go: a URI (s3://...), or a path on storage that all nodes share.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    profile: Profile = "auto",
    only: Only = None,
    matrix: Matrix = None,
    time_budget: TimeLimit = None,
    yes: Yes = False,
    follow: Annotated[bool, typer.Option(help="Show the log and wait for the end.")] = True,
) -> None:
    """Run an experiment as a job of a Ray cluster, with a copy of this directory."""
    from raypipe.commands import submit as command
    from raypipe.commands.request import Request

    given = _with_matrix(overrides, matrix), run_dir, profile, only or []
    request = Request("run", config, *given, yes=yes, time_budget=time_budget)
    raise typer.Exit(command.submit(request, address, follow=follow))


@app.command(epilog=_SWEEP_EXAMPLES)
def sweep(
    config: Config,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    profile: Profile = "auto",
    address: Address = None,
    time_budget: TimeLimit = None,
    write: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the configuration with the best point there."),
    ] = None,
) -> None:
    """Measure the points of the section `sweep` and recommend one for this machine."""
    from raypipe.commands import sweep as command
    from raypipe.commands.request import Request

    given = overrides or [], run_dir, profile, (), address, write
    raise typer.Exit(command.sweep(Request("sweep", config, *given, time_budget=time_budget)))


@app.command(epilog=_FIT_EXAMPLES)
def fit(
    config: Config,
    overrides: Overrides = None,
    profile: Profile = "auto",
    address: Address = None,
    stage: Annotated[
        str | None, typer.Option(help="The training stage. [default: each of them]")
    ] = None,
) -> None:
    """Find the largest micro-batch of each precision that fits, by a few real steps each.

    The accumulation keeps training.effective_batch; 5 % of the memory stay free. What is learned
    of the memory is kept for later sweeps and fits on the same card.
    """
    import pandas as pd

    from raypipe.commands import fit as command
    from raypipe.commands.request import Request

    request = Request("fit", config, overrides or [], None, profile, address=address)
    rows = pd.DataFrame(command.fit(request, stage))
    _show(rows.drop(columns="failed").convert_dtypes())
    raise typer.Exit(int(rows["failed"].any()))


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    profile: Profile = "auto",
    matrix: Matrix = None,
    yes: Yes = False,
) -> None:
    """Show what would run, what is done and the expected cost; start nothing."""
    from raypipe.commands import plan as command

    given = _with_matrix(overrides, matrix)
    _show(command.plan(config, given, run_dir=run_dir, profile=profile, yes=yes))


@app.command("config")
def config_command(
    config: Config,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... [PREFIX]",
            help="Overrides, as in `raypipe run`; with --keys also the prefix of the keys.",
        ),
    ] = None,
    profile: Profile = "auto",
    keys: Annotated[
        bool,
        typer.Option("--keys", help="List the keys with type, default and meaning instead."),
    ] = False,
) -> None:
    """Show the resolved configuration with the origin of every value, or all keys."""
    from raypipe.commands import config as command

    given = [text for text in overrides or [] if "=" in text or not keys]
    prefixes = [text for text in overrides or [] if text not in given]
    if len(prefixes) > 1:
        raise ConfigError(f"--keys takes one prefix, not {len(prefixes)}: {' '.join(prefixes)}")
    if keys:
        typer.echo(command.keys(config, given, profile, *prefixes))
    else:
        typer.echo(command.resolved(config, given, profile))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the hardware and the environment: GPUs, CPUs, memory, versions, Ray cluster."""
    from raypipe.commands import doctor as command
    from raypipe.hardware import bytes_text

    found = command.doctor()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    gpus = found["hardware"]["gpus"]
    for gpu in gpus:
        typer.echo(
            f"GPU {gpu['index']}: {gpu['name']}, {bytes_text(gpu['memory_bytes'])}, "
            f"compute capability {gpu['compute_capability']}, {gpu['uuid']}"
        )
    if not gpus:
        typer.echo(f"no GPU ({found['hardware']['gpu_note']}): the cpu profile will be used")
    for name, value in found.items():
        if name not in ("hardware", "gpus", "cluster"):
            typer.echo(f"{name}: {value}")
    nodes = found["cluster"]
    typer.echo(f"Ray cluster: {f'{len(nodes)} node(s)' if nodes else 'none'}")


@app.command()
def results(
    run_dir: Existing,
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="e.g. studies, trials, failures.")
    ] = None,
) -> None:
    """Print a results table; without TABLE, list the tables."""
    from raypipe.commands import results as command

    _show(command.table(run_dir, table))


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


store = typer.Typer(
    help="List, verify and prune the results that run directories share.", no_args_is_help=True
)
app.add_typer(store, name="store")


@store.command("ls")
def store_ls(location: Store = None) -> None:
    """List the entries: stage, who computed it, where, when, and its size."""
    from raypipe.commands import store as command

    _show(command.entries(location))


@store.command("verify")
def store_verify(location: Store = None) -> None:
    """Read everything and compare the checksums; exit status 1 if something is damaged."""
    from raypipe.commands import store as command

    text, whole = command.verify(location)
    typer.echo(text)
    raise typer.Exit(int(not whole))


@store.command("prune")
def store_prune(
    older_than: Annotated[
        str, typer.Option(help="Age, such as 12h, 30d or 8w.", show_default=False)
    ],
    location: Store = None,
) -> None:
    """Remove what was stored longer ago, damaged entries, and files that no entry refers to."""
    from raypipe.commands import store as command

    typer.echo(command.prune(location, older_than))


def _show(frame: Any) -> None:
    """Print a whole table on the terminal."""
    text = frame.to_string(index=False, max_colwidth=60) if len(frame) else "(no rows)"
    typer.echo(without_credentials(text))


def _spread_stages(arguments: list[str]) -> list[str]:
    """Turn ``--only A B`` into ``--only A --only B``: click's options take one value."""
    spread: list[str] = []
    further = False
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        named = not argument.startswith("-") and "=" not in argument
        further = named and (before == "--only" or further)
        spread += ["--only", argument] if further and before != "--only" else [argument]
    return spread


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C that exits cleanly: after a KeyboardInterrupt in an import, Python exits with -2."""


def _with_matrix(overrides: list[str] | None, matrix: list[str] | None) -> list[str]:
    """Return the overrides together with those of ``--matrix``."""
    return [*(overrides or []), *(f"matrix.{text}" for text in matrix or [])]


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise _Interrupted


def main() -> None:
    """Run the command line; a configuration error is one message and exit status 2.

    SIGTERM ends a command cleanly, as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        app(_spread_stages(sys.argv[1:]))
    except ConfigError as error:
        print(f"raypipe: {without_credentials(str(error))}", file=sys.stderr)
        sys.exit(2)
    except UnitError as error:
        print(f"raypipe: {without_credentials(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # the exit would collect among all objects for a second
