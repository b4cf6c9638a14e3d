"""Ray tasks."""

import itertools

import pandas as pd
import ray

from benchmarks.grid.score import score

grid = list(itertools.product([0.1, 1.0, 10.0], range(5)))
task = ray.remote(num_cpus=1)(score)
values = ray.get([task.remote(C, seed) for C, seed in grid])
rows = [{"C": C, "seed": seed, **value} for (C, seed), value in zip(grid, values, strict=True)]
pd.DataFrame(rows).to_parquet("calls.parquet")
