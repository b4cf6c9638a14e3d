"""Compare optimizers of the number of topics on recorded values, by a fixed protocol.

    python -m benchmarks.topics
    python -m benchmarks.topics --add mymodule:MyOptimizer
    python -m benchmarks.topics --add pabbo_curves@runs/mine --out runs/topics/mine.parquet

A study looks values up, so that all of them take minutes; each is a task of ``raypipe map``.
``--add`` takes the class of an optimizer with ``ask`` and ``tell``, called with the space and a
seed, or an optimizer of the main job with the run directory that trained its model, in place of
the model that ships. docs/benchmark.md describes the protocol.

Results: ``benchmarks/results/topics/studies.parquet``. ``python -m docs.generate`` writes the
leaderboard into docs/benchmark.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import pandas as pd
import typer

import raypipe as rp
from benchmarks.topics.leaderboard import STUDIES, leaderboard
from benchmarks.topics.protocol import PUBLISHED, RUNS, STARTS, corpora
from experiments.pabbo_lda.optimizers import OptimizerName

#: of the results: raise it when the protocol or an optimizer changes, so that all studies run again
VERSION = 1
#: all optimizers of the main job
OPTIMIZERS = get_args(OptimizerName)


def main(
    add: Annotated[list[str] | None, typer.Option(help="a further optimizer")] = None,
    run_dir: Annotated[Path, typer.Option(help="studies that are there are not repeated")] = Path(
        "runs/topics"
    ),
    out: Annotated[Path, typer.Option(help="the Parquet file of the studies")] = STUDIES,
) -> None:
    """Run the missing studies, write all of them, and print the leaderboard."""
    if not PUBLISHED.is_file():
        raise SystemExit(f"{PUBLISHED}: not found; set RAYPIPE_DATA to the folder of the data")
    arguments = {
        "corpus": list(corpora()),
        "start": list(STARTS),
        "optimizer": [*OPTIMIZERS, *(add or ())],
        "run": list(range(RUNS)),
    }
    function = "benchmarks.topics.protocol:study"
    calls = rp.map(function, arguments, version=VERSION, run_dir=run_dir).table("calls")
    table = calls[
        ["corpus", "start", "optimizer", "run", "reached", "evaluations", "area", "regret"]
    ]
    table = table.assign(optimizer=table["optimizer"].str.replace("@.*", ", trained", regex=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    order = ["corpus", "start", "optimizer", "run"]
    table.sort_values(order).to_parquet(out, index=False)
    with pd.option_context("display.width", 160):
        print(leaderboard(table).to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
