"""Optuna's grid sampler, with a database."""

import optuna

from benchmarks.grid.score import score

GRID: dict[str, list[float]] = {"C": [0.1, 1.0, 10.0], "seed": [0, 1, 2, 3, 4]}


def objective(trial: optuna.Trial) -> float:
    """Return the value of a trial."""
    C, seed = (trial.suggest_categorical(name, values) for name, values in GRID.items())
    return score(C, int(seed))["accuracy"]


study = optuna.create_study(
    study_name="grid",
    storage="sqlite:///grid.db",
    load_if_exists=True,
    sampler=optuna.samplers.GridSampler(GRID),
    direction="maximize",
)
study.optimize(objective, n_jobs=2)
study.trials_dataframe().to_parquet("calls.parquet")
