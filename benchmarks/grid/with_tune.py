"""Ray Tune, restored if it was interrupted."""

from pathlib import Path
from typing import Any

from ray import tune

from benchmarks.grid.score import score


def trainable(config: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a trial."""
    return score(config["C"], config["seed"])


place = Path("tune").absolute()
if tune.Tuner.can_restore(place):
    tuner = tune.Tuner.restore(str(place), trainable, resume_errored=True)
else:
    grid = {"C": tune.grid_search([0.1, 1.0, 10.0]), "seed": tune.grid_search(list(range(5)))}
    config = tune.RunConfig(name=place.name, storage_path=str(place.parent), verbose=0)
    tuner = tune.Tuner(trainable, param_space=grid, run_config=config)
tuner.fit().get_dataframe().to_parquet("calls.parquet")
