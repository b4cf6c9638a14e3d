"""Benchmark PABBO's sampler on tuning problems of scikit-learn, against samplers of Optuna.

    python -m benchmarks.tuning values     # cross-validate each point of each table, 5 to 10 min
    python -m benchmarks.tuning run        # the samplers on the tables, 10 min on two cores
    python -m docs.generate                # the table of docs/howto/optuna.md

An evaluation looks up a table of cross-validated values; between the values of a real parameter it
is interpolated linearly on the parameter's scale. All samplers start from the same random points,
by problem and seed, and make the same number of evaluations. Optuna's CMA-ES takes two parameters
or more.

Results: ``benchmarks/results/tuning``: ``values.parquet``, and ``runs-SAMPLER.parquet`` with the
value of each evaluation.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import optuna
import pandas as pd
import torch
import typer
from numpy.typing import NDArray
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, RandomSampler, TPESampler
from rich import print as show
from rich.progress import track
from scipy.interpolate import RegularGridInterpolator

from benchmarks.tuning_problems import PROBLEMS, Axis, Problem
from experiments.pabbo_lda.samplers.optuna import PabboSampler

RESULTS = Path(__file__).parent / "results" / "tuning"
START, EVALUATIONS, SEEDS = 4, 25, 10

app = typer.Typer(add_completion=False, help=__doc__)

SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "pabbo": lambda seed: PabboSampler(seed=seed, n_startup_trials=START),
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=START),
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=START, multivariate=True),
    "cma_es": lambda seed: CmaEsSampler(seed=seed, n_startup_trials=START),
    "random": lambda seed: RandomSampler(seed=seed),
}


@app.command()
def values() -> None:
    """Cross-validate every point of every table."""
    rows = []
    for problem in track(PROBLEMS):
        for number, point in enumerate(problem.points()):
            about = {"problem": problem.name, "data": problem.data, "number": number}
            rows.append({**about, "value": problem.evaluate(point)})
    RESULTS.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(RESULTS / "values.parquet", index=False)


@app.command()
def run(
    only: Annotated[list[str] | None, typer.Option(help="Samplers to run; all by default.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat stored runs.")] = False,
) -> None:
    """Run the samplers on the tables; a command that was stopped continues."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    for name in only or SAMPLERS:
        file = RESULTS / f"runs-{name}.parquet"
        stored = pd.read_parquet(file) if file.is_file() and not again else pd.DataFrame()
        known = set() if stored.empty else set(zip(stored["problem"], stored["data"], strict=True))
        for problem in track(PROBLEMS, name):
            if (problem.name, problem.data) not in known:
                stored = pd.concat([stored, pd.DataFrame(_rows(problem, name))])
                stored.to_parquet(file, index=False)
    show(f"written to {RESULTS}; python -m docs.generate writes the tables of the docs")


def _rows(problem: Problem, name: str) -> Iterator[dict[str, object]]:
    """Yield the evaluations of a sampler on a problem, over all seeds."""
    if name == "cma_es" and len(problem.axes) == 1:
        return
    table = tabulated(problem)
    about = {"problem": problem.name, "data": problem.data, "parameters": len(problem.axes)}
    about |= {"sampler": name}
    for seed in range(SEEDS):
        own = seed_of(problem, seed)
        for number, value in enumerate(sequence(problem, table, SAMPLERS[name](own), own)):
            yield {**about, "seed": seed, "number": number, "value": value}


def seed_of(problem: Problem, seed: int) -> int:
    """Return the seed of a problem's starts and sampler; problems are independent."""
    name = zlib.crc32(f"{problem.name} {problem.data}".encode())
    return int(np.random.SeedSequence([seed, name]).generate_state(1)[0])


def tabulated(problem: Problem) -> NDArray[np.float64]:
    """Return the values of a problem's table, in its shape."""
    table = pd.read_parquet(RESULTS / "values.parquet")
    own = table[(table["problem"] == problem.name) & (table["data"] == problem.data)]
    return own.sort_values("number")["value"].to_numpy().reshape(problem.shape)


def sequence(
    problem: Problem, table: NDArray[np.float64], sampler: BaseSampler, seed: int
) -> list[float]:
    """Return the values that a sampler finds, in order; the seed decides the first points."""
    axes = problem.axes
    look_up = RegularGridInterpolator([axis.positions for axis in axes.values()], table)

    def objective(trial: optuna.Trial) -> float:
        drawn = [_drawn(trial, name, axis) for name, axis in axes.items()]
        places = [
            axis.scale.positions(value) for axis, value in zip(axes.values(), drawn, strict=True)
        ]
        return float(look_up(places)[0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # options that may change, and CMA-ES's own draws
        study = optuna.create_study(sampler=sampler)
        rng = np.random.default_rng(seed)
        for places in rng.uniform(-1, 1, (START, len(axes))):
            study.enqueue_trial(
                {
                    name: _native(axis, float(axis.scale.values(place)))
                    for (name, axis), place in zip(axes.items(), places, strict=True)
                }
            )
        study.optimize(objective, n_trials=EVALUATIONS)
    return [trial.value for trial in study.trials if trial.value is not None]


def _drawn(trial: optuna.Trial, name: str, axis: Axis) -> float:
    scale = axis.scale
    if scale.step is not None:
        return trial.suggest_int(name, int(scale.low), int(scale.high))
    return trial.suggest_float(name, scale.low, scale.high, log=scale.log)


def _native(axis: Axis, value: float) -> float:
    return value if axis.scale.step is None else round(value)


if __name__ == "__main__":
    app()
