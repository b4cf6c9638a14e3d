"""Studies of the main job on recorded values, which leave only raypipe's overhead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

FIRST_SEED, EVALUATIONS = 42, 80
OPTIMIZERS = ("random", "es")
_TOPICS = np.array([2, 10, 50, 200, 500, 1000])


def configuration(evaluations: int, folder: Path) -> str:
    """Return a configuration of about this many evaluations: studies of 80 artificial values.

    Two optimizers share their start of 20 evaluations, so that a pair of studies has 140.
    """
    runs = max(2, round(evaluations / (2 * EVALUATIONS - 20)))
    draw = np.random.default_rng(0)
    tables = [
        pd.DataFrame(
            {
                "dataset": "made_up",
                "seed": FIRST_SEED + run,
                "T": _TOPICS,
                "perplexity": 1000 + 300 * draw.random(len(_TOPICS)),
            }
        )
        for run in range(runs)
    ]
    table = folder / "values.csv"
    pd.concat(tables).to_csv(table, index=False)
    return f"""
experiment: experiments.pabbo_lda
lda:
  objective: tabular
  table: {table}
  datasets: [made_up]
  optimizers: [{", ".join(OPTIMIZERS)}]
  runs: {runs}
  evaluations: {EVALUATIONS}
"""
