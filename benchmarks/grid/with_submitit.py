"""submitit; with `slurm_partition` instead of the local executor the same lines run on SLURM."""

import itertools

import pandas as pd
import submitit

from benchmarks.grid.score import score

grid = list(itertools.product([0.1, 1.0, 10.0], range(5)))
executor = submitit.AutoExecutor("submitit", cluster="local")
executor.update_parameters(timeout_min=10)
jobs = executor.map_array(score, *zip(*grid, strict=True))
values = [job.result() for job in jobs]
rows = [{"C": C, "seed": seed, **value} for (C, seed), value in zip(grid, values, strict=True)]
pd.DataFrame(rows).to_parquet("calls.parquet")
