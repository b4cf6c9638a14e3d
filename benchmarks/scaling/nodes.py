"""The command on clusters of more and more simulated nodes."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ray.cluster_utils import Cluster

from benchmarks.scaling.runs import run_command
from raypipe.ledger import Ledger
from raypipe.paths import RunDirectory

# between these parts of the units, the workers have started and none is idle
_FROM, _TO = 0.5, 0.95
_STORE_BYTES = 80_000_000


def measure(nodes: int, cpus: int, seconds: float, waves: int) -> dict[str, Any]:
    """Units that sleep, so many for each CPU of the cluster, one after the other.

    ``rate`` counts the units that ended in the second half of the run, ``ideal`` what the CPUs
    could do.

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
                f"work: {{count: {units}, kind: sleep, seconds: {seconds}}}\n"
            )
            command = ["run", config, "--run-dir", place, "--address", cluster.address]
            load = os.getloadavg()[0]
            cost = run_command(command, Path(folder, "log"))
            ledger = Ledger(RunDirectory.at(place), writable=False)
    finally:
        cluster.shutdown()
    rows = ledger.rows("evaluations")
    if len(rows) != units:
        raise RuntimeError(f"{len(rows)} of {units} units have a result")
    on = Counter(row["node"] for row in rows)
    ended = [r["finished_at"] for r in ledger.rows("units") if r["stage"] == "units"]
    times = np.sort([datetime.fromisoformat(at).timestamp() for at in ended])
    first, last = int(_FROM * units), int(_TO * units) - 1
    window = times[last] - times[first]
    cpu = np.interp([times[first], times[last]], *zip(*cost.cpu_by_time, strict=True))
    rate, ideal = (last - first) / window, nodes * cpus / seconds
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
        "driver_cpu_share": (cpu[1] - cpu[0]) / window,
        "driver_cpu_us_per_unit": 1e6 * (cpu[1] - cpu[0]) / (last - first),
        "driver": cost.whole,
    }
