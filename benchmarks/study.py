"""Benchmark a reduced study with the existing scripts and with raypipe, on the same cores.

    pip install -e '.[bench]'
    python -m benchmarks.study --reference CHECKOUT/lda_hyperopt

CHECKOUT is the public repository draiqw/lgd, branch SABO, whose cluster script starts
``run_no_early_stop.py`` in a process per algorithm and seed. This benchmark does the same, with
one concurrent process per core and one scikit-learn job each: more processes or jobs only compete
for the cores, and the number of jobs changes the values. raypipe then runs
``configs/pabbo_lda.yaml`` on the same corpus, seeds and passes with the corresponding optimizers,
in one command without its cache. Each optimizer makes as many iterations as in the scripts (its
batches are at least as large). The utilization of the cores is measured in this run, and again
with the 60 passes of a study, which would take the scripts hours.

Both times are of whole commands, including imports and the start of Ray. PABBO's model is trained
beforehand and not counted, because the scripts' PABBO_Simple has no model.

Results: ``benchmarks/results/study/<corpus>.json``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich import print as show

from benchmarks.training import machine
from raypipe.hardware import detect
from raypipe.provenance import git_commit, package_version
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table

#: raypipe's optimizer for each algorithm of the scripts
COUNTERPARTS = {"GA": "ga", "ES": "es", "PABBO_Simple": "pabbo_small", "SABO": "sabbo"}
FIRST_SEED, BATCH_SIZE, PASSES = 42, 2048, 60
GOAL_RATIO, GOAL_EFFICIENCY, TOLERANCE = 10.0, 0.95, 0.002
_EVALUATION = re.compile(
    r"\[LDA\] Training LDA on val: T=(\d+),.*?"
    r"\[LDA\] Evaluation completed in [\d.]+s \| Perplexity: ([\d.e+]+|inf|nan)",
    re.DOTALL,
)

#: (seed, T) to perplexity
Values = dict[tuple[int, int], float]


def environment(**changed: str) -> dict[str, str]:
    """Return the environment for a process with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", **changed}


def run_scripts(
    reference: Path, data: Path, seeds: int, passes: int, iterations: int, folder: Path
) -> dict[str, Any]:
    """Run the scripts in all their processes; return seconds, values and distinct T per process."""

    def one(algorithm: str, seed: int) -> str:
        command = [sys.executable, "run_no_early_stop.py", "--algorithms", algorithm]
        options = {
            "--data": data,
            "--seed": seed,
            "--iterations": iterations,
            "--max-iter": passes,
            "--batch-size": BATCH_SIZE,
            "--outdir": folder / f"{algorithm}-{seed}",
        }
        command += [str(part) for pair in options.items() for part in pair]
        done = subprocess.run(
            command,
            cwd=reference,
            env=environment(LOKY_MAX_CPU_COUNT="1", PYTHONPATH=str(reference.resolve().parent)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{algorithm}, seed {seed}: {done.stderr[-2000:]}")
        return done.stdout

    jobs = [(name, FIRST_SEED + run) for run in range(seeds) for name in COUNTERPARTS]
    began = time.perf_counter()
    with ThreadPoolExecutor(detect().cpus) as pool:
        printed = list(pool.map(lambda job: one(*job), jobs))
    seconds = time.perf_counter() - began
    values: Values = {}
    evaluated: dict[str, list[int]] = defaultdict(list)
    for (name, seed), text in zip(jobs, printed, strict=True):
        found = {(seed, int(T)): float(value) for T, value in _EVALUATION.findall(text)}
        evaluated[name].append(len(found))
        values |= found
    return {"wall_s": seconds, "values": values, "distinct_T": dict(evaluated)}


def run_raypipe(
    corpus: str, data: Path, seeds: int, passes: int, iterations: int, folder: Path
) -> dict[str, Any]:
    """Run the whole command; return seconds, values and the utilization of the cores."""
    run = RunDirectory.at(folder / "run")
    options = {
        "data.source": "bow",
        "data.dir": data.parent,
        "train_small.training.steps": 20,  # the quality of the model does not matter here
        "lda.datasets": f"[{corpus}]",
        "lda.optimizers": f"[{','.join(COUNTERPARTS.values())}]",
        "lda.runs": seeds,
        "lda.seed": FIRST_SEED,
        "lda.max_iter": passes,
        "lda.batch_size": BATCH_SIZE,
        "lda.iterations": iterations,
        "lda.evaluations": 1000,
        "lda.final_seeds": 0,  # the scripts have no final comparison
        "lda.cache": "false",
    }
    command = [sys.executable, "-m", "raypipe", "run", "configs/pabbo_lda.yaml"]
    command += ["--run-dir", run.location, *(f"{key}={value}" for key, value in options.items())]
    for stage in ("train_small", "lda"):
        began = time.perf_counter()
        subprocess.run([*command, "--only", stage], env=environment(), check=True)
        seconds = time.perf_counter() - began
    table = read_table(run, "evaluations")
    started = table["started_at"]
    span = (started + pd.to_timedelta(table["duration_s"], "s")).max() - started.min()
    studies = read_table(run, "studies")
    names = {ours: theirs for theirs, ours in COUNTERPARTS.items()}
    return {
        "wall_s": seconds,
        "values": {
            (int(seed), int(T)): float(value)
            for seed, T, value in table[["seed", "T", "value"]].itertuples(index=False)
        },
        "distinct_T": {
            names[str(name)]: group["unique_evaluations"].tolist()
            for name, group in studies.groupby("optimizer")
        },
        "evaluations": len(table),
        "cpu_s": float(table["cpu_s"].sum()),
        "first_to_last_s": span.total_seconds(),
        "efficiency": float(table["cpu_s"].sum() / detect().cpus / span.total_seconds()),
    }


def main(
    reference: Annotated[Path, typer.Option(help="the folder lda_hyperopt of the scripts")],
    corpus: Annotated[str, typer.Option(help="a corpus of the published study")] = "agnews",
    seeds: Annotated[int, typer.Option(help="runs per algorithm")] = 2,
    passes: Annotated[int, typer.Option(help="of LDA; a study's 60 take the scripts long")] = 5,
    iterations: Annotated[int, typer.Option(help="of the scripts' algorithms")] = 4,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path(
        "benchmarks/results/study"
    ),
) -> None:
    """Run both in sequence and compare them."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    folder = Path(os.environ.get("RAYPIPE_DATA", "../shared/data")) / "lda_bow"
    data = (folder / f"X_{corpus}_val_bow.npz").resolve()
    with tempfile.TemporaryDirectory() as scratch:
        scripts = run_scripts(reference, data, seeds, passes, iterations, Path(scratch))
        show(f"existing scripts: {scripts['wall_s']:.0f} s, distinct T {scripts['distinct_T']}")
        ours = run_raypipe(corpus, data, seeds, passes, iterations, Path(scratch, "reduced"))
        full = run_raypipe(corpus, data, seeds, PASSES, iterations, Path(scratch, "full"))
    theirs, values = scripts.pop("values"), ours.pop("values")
    full.pop("values")
    shared = sorted(theirs.keys() & values.keys())
    differences = [abs(values[at] / theirs[at] - 1) for at in shared]
    ratio = scripts["wall_s"] / ours["wall_s"]
    report = {
        "started": started,
        "commit": git_commit(),
        "machine": machine(torch.device("cpu"), threads=1),
        "packages": {
            package: package_version(package) for package in ("scikit-learn", "numba", "ray")
        },
        "study": {
            "corpus": corpus,
            "seeds": seeds,
            "passes": passes,
            "iterations": iterations,
        },
        "scripts": scripts,
        "raypipe": ours,
        f"raypipe_{PASSES}_passes": full,
        "ratio": ratio,
        "shared_evaluations": len(shared),
        "largest_difference": max(differences),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{corpus}.json").write_text(json.dumps(report, indent=1) + "\n")
    show(
        f"{corpus}: scripts {scripts['wall_s']:.0f} s, raypipe {ours['wall_s']:.1f} s: "
        f"{ratio:.1f} times less (goal {GOAL_RATIO:g})\n"
        f"{len(shared)} shared evaluations, largest relative difference {max(differences):.1e} "
        f"(allowed {TOLERANCE:g})\n"
        + "\n".join(
            f"raypipe, {count} passes: {run['evaluations']} evaluations, {run['cpu_s']:.1f} CPU s "
            f"in {run['first_to_last_s']:.1f} s: efficiency {run['efficiency']:.3f} "
            f"(goal {GOAL_EFFICIENCY})"
            for count, run in ((passes, ours), (PASSES, full))
        )
    )
    if max(differences) > TOLERANCE:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
