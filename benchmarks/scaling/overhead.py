"""Units run by raypipe's pool, recorded durably, against bare Ray tasks, unrecorded."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import ray

from benchmarks.scaling import experiment
from benchmarks.scaling.units import Kind, unit
from raypipe.graph.configuration import compose
from raypipe.graph.context import Session, StageContext
from raypipe.graph.launcher import Launcher
from raypipe.graph.progress import Display
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.tracking import Trackers

REFERENCE, OURS = "bare_ray", "raypipe"


@dataclass(frozen=True)
class Case:
    """Number and kind of the units, and the fraction of a CPU of each."""

    kind: Kind
    cpus: float
    units: int
    seconds: float = 0.1

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.kind}, {self.cpus:g} CPU"


def by_ray(case: Case) -> int:
    """Submit all tasks to Ray at once and take results as they arrive."""
    task = ray.remote(unit).options(num_cpus=case.cpus, max_retries=0)
    waiting = [task.remote(case.kind, case.seconds, number) for number in range(case.units)]
    done = 0
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=min(len(waiting), 100), timeout=0.1)
        done += len(ray.get(ready))
    return done


def by_raypipe(case: Case, launcher: Launcher, folder: Path) -> int:
    """Run a stage of the toy experiment in a run directory, as the command does."""
    work = experiment.Work(count=case.units, kind=case.kind, seconds=case.seconds, cpus=case.cpus)
    settings = experiment.Scale(work=work)
    stage = compose(experiment.EXPERIMENT, settings, experiment.stages(settings))[0]
    run = RunDirectory.at(folder)
    ledger = Ledger(run)
    with redirect_stdout(io.StringIO()), Trackers((), run, "b", "scale", {}) as trackers:
        session = Session(run, "b", ledger, launcher, Display(), [], trackers)
        stage.run(StageContext(stage, session))
    return len(ledger.rows("units"))


def measure(contender: Callable[[], int], case: Case) -> dict[str, Any]:
    """Run once; return seconds, units per second and CPU seconds of this process.

    Raises:
        RuntimeError: a different number of units was finished.

    """
    clock, cpu = time.perf_counter(), time.process_time()
    done = contender()
    seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
    if done != case.units:
        raise RuntimeError(f"{case.name}: {done} of {case.units} units were done")
    rate = done / seconds
    return {"seconds": seconds, "units_per_s": rate, "driver_cpu_us_per_unit": 1e6 * cpu / done}


def run_rounds(case: Case, launcher: Launcher, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return a row per round and contender, in random order; a first round starts the workers."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(-1, rounds):
        order = [REFERENCE, OURS]
        draw.shuffle(order)
        for name in order:
            with TemporaryDirectory(prefix="raypipe-scale-") as folder:
                contenders: dict[str, Callable[[], int]] = {
                    REFERENCE: partial(by_ray, case),
                    OURS: partial(by_raypipe, case, launcher, Path(folder)),
                }
                row = measure(contenders[name], case)
            if number >= 0:
                load = os.getloadavg()[0]
                rows.append({"round": number, "contender": name, "load": load, **row})
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and spread of both contenders, and the ratio of their rates by round."""
    rates = {
        name: {r["round"]: r for r in rows if r["contender"] == name} for name in (REFERENCE, OURS)
    }
    ratios = [
        mine["units_per_s"] / rates[REFERENCE][number]["units_per_s"]
        for number, mine in rates[OURS].items()
    ]
    summary: dict[str, Any] = {"ratio": spread(ratios)}
    for name, found in rates.items():
        summary[name] = {
            key: spread([row[key] for row in found.values()])
            for key in ("units_per_s", "driver_cpu_us_per_unit")
        }
    summary["load"] = spread([row["load"] for row in rows])
    return summary


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles, minimum and maximum."""
    lower, _, upper = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {
        "median": median(values),
        "lower_quartile": lower,
        "upper_quartile": upper,
        "low": min(values),
        "high": max(values),
    }
