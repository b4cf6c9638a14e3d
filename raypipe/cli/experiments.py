"""Commands on a configuration: run, submit, sweep, fit, plan and config."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from raypipe.cli.arguments import (
    Address,
    Cards,
    CardsPerNode,
    Checkpointing,
    Config,
    Local,
    Matrix,
    Only,
    Overrides,
    Precisions,
    Profile,
    RunDir,
    TimeLimit,
    Yes,
    need_card,
    print_frame,
    show_start,
    with_matrix,
)
from raypipe.cli.completion import run_directories
from raypipe.errors import ConfigError

app = typer.Typer()

_EXAMPLES = """\b
Examples:
  raypipe run quickstart
  raypipe run --list
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
  raypipe fit lm_pretrain --card "RTX A6000" --precision bf16
  raypipe fit summarization model=mt5_1_2b --card a100-40 --cards-per-node 4
  raypipe fit lm_pretrain --card all --cards prices.yaml
"""

_MAP_EXAMPLES = """\b
Examples:
  raypipe map mymodule:score 'C=[0.1,1,10]' 'gamma=[0.01,0.1]' seed=0..4 --cpus 0.5
  raypipe map mymodule:score seed=0..99 --maximize accuracy --run-dir runs/mine
"""

_SUBMIT_EXAMPLES = """\b
Examples:
  raypipe submit configs/pabbo_lda.yaml --address http://HEAD:8265 --run-dir /shared/runs/mine
  raypipe submit configs/lm_pretrain.yaml train.training.steps=5000 --no-follow \\
    --address http://HEAD:8265 --run-dir s3://BUCKET/runs/lm
"""


_INIT_EXAMPLES = """\b
Examples:
  raypipe init mine
  raypipe init mine --template pabbo_lda
"""


def _list_configurations(wanted: bool) -> None:
    if wanted:
        from raypipe.config.shipped import listing

        typer.echo(listing())
        raise typer.Exit


@app.command(epilog=_EXAMPLES)
def run(
    config: Config,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    profile: Profile = "auto",
    only: Only = None,
    matrix: Matrix = None,
    address: Address = None,
    _listed: Annotated[
        bool,
        typer.Option(
            "--list",
            callback=_list_configurations,
            is_eager=True,  # without CONFIG
            help="List the configurations that come with raypipe.",
        ),
    ] = False,
    time_budget: TimeLimit = None,
    yes: Yes = False,
    strict_code: Annotated[
        bool,
        typer.Option(
            "--strict-code",
            help="Refuse to continue a run whose experiment's source code changed.",
        ),
    ] = False,
    local: Local = False,
) -> None:
    """Run an experiment; finished work is kept and never repeated."""
    show_start()
    from raypipe.commands import run as command
    from raypipe.commands.request import Request

    given = with_matrix(overrides, matrix), run_dir, profile, only or [], address
    further: dict[str, Any] = {"strict_code": strict_code, "yes": yes, "time_budget": time_budget}
    further["local"] = local
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

    given = with_matrix(overrides, matrix), run_dir, profile, only or []
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
    show_start()
    from raypipe.commands import run as command
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
    card: Annotated[
        str | None,
        typer.Option(
            help='Predict for this card instead, e.g. "RTX A6000", h100-80; needs no GPU. `all` '
            "compares all cards."
        ),
    ] = None,
    precision: Precisions = None,
    gradient_checkpointing: Checkpointing = None,
    cards_per_node: CardsPerNode = None,
    cards: Cards = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            help="With --card: a run whose table `card_predictions` receives the rows, next to its "
            "measurements.",
            autocompletion=run_directories,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the largest micro-batch of each precision that fits, by a few real steps each.

    The accumulation keeps training.effective_batch; 5 % of the memory stay free. What is learned
    of the memory is kept for later sweeps and fits on the same card.

    With --card nothing is trained: memory, speed and energy are predicted from the model.
    """
    show_start()
    import pandas as pd

    from raypipe.commands.request import Request

    given = {"cards-per-node": cards_per_node, "cards": cards, "precision": precision}
    need_card(card, given | {"gradient-checkpointing": gradient_checkpointing})
    if card is None:
        if run_dir is not None:
            raise ConfigError("--run-dir: needs --card: the measurements of a fit are not kept")
        from raypipe.commands import fit as command

        request = Request("fit", config, overrides or [], None, profile, address=address)
        rows = command.fit(request, stage)
        failed = any(row["failed"] for row in rows)
        shown = pd.DataFrame(rows).drop(columns="failed").convert_dtypes()
    else:
        from raypipe.commands import prediction, prediction_view

        request = Request("fit", config, overrides or [], run_dir, profile)
        chosen = card, cards_per_node, cards, stage, precision or (), gradient_checkpointing
        rows = prediction.predict(request, prediction.Wanted(*chosen))
        failed, shown = False, pd.DataFrame(prediction_view.shown(rows))
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        print_frame(shown)
        if card is not None:
            typer.echo(prediction_view.conclusion(rows))
    raise typer.Exit(int(failed))


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    profile: Profile = "auto",
    only: Only = None,
    matrix: Matrix = None,
    yes: Yes = False,
) -> None:
    """Show what would run, what is done and the expected cost; start nothing."""
    from raypipe.commands import plan as command
    from raypipe.commands.request import Request

    given = with_matrix(overrides, matrix), run_dir, profile, only or []
    print_frame(command.plan(Request("plan", config, *given, yes=yes)))


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


@app.command("map", epilog=_MAP_EXAMPLES)
def map_command(
    function: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="The function, e.g. mymodule:score.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Arguments; a list [0.1,1,10] or a range 0..4 (both ends included) is an axis. "
            "Other keys are settings, such as matrix.search or tracking=[tensorboard].",
        ),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(help="CPUs per call, such as 0.5. [default: 1]")
    ] = None,
    gpus: Annotated[float | None, typer.Option(help="GPUs per call. [default: 0]")] = None,
    attempts: Annotated[
        int | None,
        typer.Option(help="Attempts of a call whose worker dies or takes too long. [default: 3]"),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(help="Time after which an attempt is ended: 90s, 10m, 2h.")
    ] = None,
    maximize: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A returned value; higher is better.")
    ] = None,
    minimize: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A returned value; lower is better.")
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(help="Version of the results. [default: 1, for the present source code only]"),
    ] = None,
    run_dir: RunDir = None,
    address: Address = None,
    time_budget: TimeLimit = None,
    local: Local = False,
) -> None:
    """Call a function for every combination of its arguments; each call becomes a row."""
    from raypipe.commands.map import map_function
    from raypipe.commands.time_budget import seconds_of

    settings = {
        "cpus": cpus,
        "gpus": gpus,
        "attempts": attempts,
        "time_limit_s": None if time_limit is None else seconds_of(time_limit, "--time-limit"),
        "maximize": maximize,
        "minimize": minimize,
        "version": version,
    }
    given: dict[str, Any] = {"run_dir": run_dir, "address": address, "time_budget": time_budget}
    given["local"] = local
    raise typer.Exit(map_function(function, arguments or [], settings, **given).status)


@app.command(epilog=_INIT_EXAMPLES)
def init(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The new folder. [default: my_TEMPLATE]")
    ] = None,
    template: Annotated[
        str, typer.Option(help="The template (`raypipe init --list`).", show_default=True)
    ] = "function",
    listed: Annotated[bool, typer.Option("--list", help="List the templates.")] = False,
) -> None:
    """Write a small project of your own that runs at once: code, YAML, test, README."""
    from raypipe.commands import init as command

    typer.echo(command.listing() if listed else command.init(name, template))
