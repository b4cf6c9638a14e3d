"""joblib, with its cache of function values."""

import itertools

import pandas as pd
from joblib import Memory, Parallel, delayed

from benchmarks.grid.score import score

grid = list(itertools.product([0.1, 1.0, 10.0], range(5)))
cached = Memory("cache", verbose=0).cache(score)
values = Parallel(n_jobs=2)(delayed(cached)(C, seed) for C, seed in grid)
rows = [{"C": C, "seed": seed, **value} for (C, seed), value in zip(grid, values, strict=True)]
pd.DataFrame(rows).to_parquet("calls.parquet")
