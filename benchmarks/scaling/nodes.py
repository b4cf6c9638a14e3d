"""Benchmark of the command on clusters of growing numbers of simulated nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.cluster_utils import Cluster

from benchmarks.scaling.runs import run_command
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

# between these fractions of the units, all workers have started and none is idle
_FROM, _TO = 0.5, 0.95
_STORE_BYTES = 80_000_000


def measure(nodes: int, cpus: int, seconds: float, waves: int) -> dict[str, Any]:
    """Run sleeping units, ``waves`` in sequence per CPU of the cluster; return the measurements.

    ``rate`` counts the units that ended in the second half of the run; ``ideal`` is the rate of
    fully used CPUs. A bare Ray script then runs the same units on the same nodes.

    Raises:
        RuntimeError: the command failed, or a unit has no result.

    """
    units = nodes * cpus * waves
    node = {"num_cpus": cpus, "object_store_memory": _STORE_BYTES}
    begin = time.monotonic()
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(wait=False, **node)
        cluster.wait_for_nodes(timeout=600)
        started_s = time.monotonic() - begin
        with TemporaryDirectory(prefix="raypipe-scale-") as folder:
            config, place = Path(folder, "scale.yaml"), Path(folder, "run")
            config.write_text(
                "experiment: benchmarks.scaling.experiment\n"
                f"work: {{count: {units}, seconds: {seconds}}}\n"
            )
            command = ["run", config, "--run-dir", place, "--address", cluster.address]
            load = os.getloadavg()[0]
            cost = run_command(command, Path(folder, "log"))
            ledger = Ledger(RunDirectory.at(place), writable=False)
        reference = _by_ray(cluster.address, units, seconds)
    finally:
        cluster.shutdown()
    rows = ledger.rows("evaluations")
    if len(rows) != units:
        raise RuntimeError(f"{len(rows)} of {units} units have a result")
    on = Counter(row["node"] for row in rows)
    ended = [r["finished_at"] for r in ledger.rows("units") if r["stage"] == "units"]
    times = np.sort([datetime.fromisoformat(at).timestamp() for at in ended])
    begin_s, end_s, done = _window(times)
    at, spent = zip(*cost.cpu_by_time, strict=True)
    cpu = np.interp([begin_s, end_s], at, spent)
    rate, ideal = done / (end_s - begin_s), nodes * cpus / seconds
    begin_of_bare, end_of_bare, _ = _window(reference)
    bare = done / (end_of_bare - begin_of_bare)
    return {
        "nodes": nodes,
        "cpus_per_node": cpus,
        "unit_s": seconds,
        "units": units,
        "load": load,
        "start_of_the_nodes_s": started_s,
        "nodes_used": len(on),
        "fewest_units_of_a_node": min(on.values()),
        "most_units_of_a_node": max(on.values()),
        "rate": rate,
        "ideal": ideal,
        "ratio": rate / ideal,
        "rate_of_bare_ray": bare,
        "ratio_to_bare_ray": rate / bare,
        "driver_cpu_share": (cpu[1] - cpu[0]) / (end_s - begin_s),
        "driver_cpu_us_per_unit": 1e6 * (cpu[1] - cpu[0]) / done,
        "driver": cost.whole,
    }


def _by_ray(address: str, units: int, seconds: float) -> NDArray[np.float64]:
    """Return the finish times of a bare Ray script's units; it runs in a separate process."""
    words = ["benchmarks.scaling.peers", "cluster", address, f"{units}", f"{seconds}"]
    command = [sys.executable, "-m", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return np.array(json.loads(ended.stdout.splitlines()[-1]))


def _window(times: NDArray[np.float64]) -> tuple[float, float, int]:
    """Return the begin and end of the measured window and the number of units that ended in it."""
    first, last = int(_FROM * len(times)), int(_TO * len(times)) - 1
    return float(times[first]), float(times[last]), last - first
