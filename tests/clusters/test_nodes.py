"""The main job on clusters of two and four nodes, one of which goes away in the middle."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from raypipe.paths import RunDirectory
from raypipe.results import read_table
from tests.clusters import namespaces
from tests.clusters.namespaces import Host, Network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WAIT_S = 900
CONFIG = """
experiment: experiments.pabbo_lda
data: {options: {max_documents: 300, max_features: 200, min_df: 2}}
train_small:
  training: {steps: 6, micro_batch: 4, log_every: 2, checkpoint_every: 2}
  pabbo: &pabbo {policy_batch: 2, trajectories: 2, horizon: 4}
evaluate_small: &evaluation
  {functions: 6, starts: 1, steps: 5, query_points: 32, candidate_pairs: 64}
train_large:
  training: {steps: 4, micro_batch: 4, log_every: 2, checkpoint_every: 2}
  pabbo: *pabbo
evaluate_large: *evaluation
lda:
  {runs: 2, t_max: 60, start: [9, 30, 55], evaluations: 8, max_iter: 2, batch_size: 64,
   cpus: 1, cache: false}
"""
STAGES = {"hardware", "train_small", "evaluate_small", "train_large", "evaluate_large"}
STAGES |= {"lda", "aggregate"}
SLOWLY = "delay_task:s=1"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
# a node that does not answer is given up after some ten seconds
ENVIRONMENT = TOKEN | {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": "",
}
NODE = ("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats")


class Cluster:
    """A head, and what is done with it from outside."""

    def __init__(self, net: Network, work: Path) -> None:
        self._net, self._work = net, work
        self.head = net.host(ENVIRONMENT)
        address = self.head.address
        ray_start = ("ray", "start", "--head", "--port=6379", f"--node-ip-address={address}")
        self.head.run(*ray_start, "--dashboard-host=0.0.0.0", *NODE)
        self.dashboard = f"http://{address}:8265"
        _wait_until(lambda: _listens(address, 8265), "the dashboard listens")

    def add(self) -> Host:
        """One more node."""
        host = self._net.host(ENVIRONMENT)
        host.run("ray", "start", f"--address={self.head.address}:6379", *NODE)
        return host

    def ray_job_submit(self, folder: Path, faults: str) -> subprocess.Popen[str]:
        """As the documentation of Ray has it."""
        variables = json.dumps({"env_vars": {"RAYPIPE_FAULTS": faults}})
        submit = ("ray", "job", "submit", "--address", self.dashboard, "--working-dir", ".")
        command = ("raypipe", "run", "tiny.yaml", "--run-dir", str(folder))
        return self._start(*submit, "--runtime-env-json", variables, "--", *command)

    def raypipe_submit(self, folder: Path, faults: str) -> subprocess.Popen[str]:
        """As ours has it."""
        submit = ("-m", "raypipe", "submit", "tiny.yaml", "--address", self.dashboard)
        return self._start(sys.executable, *submit, "--run-dir", str(folder), faults=faults)

    def _start(self, *words: str, faults: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(words),
            cwd=self._work,
            env={**os.environ, **ENVIRONMENT, "RAYPIPE_FAULTS": faults},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


Submit = Callable[[Cluster, Path, str], "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    namespaces.require()
    work = tmp_path_factory.mktemp("work")  # the directory of which a job gets a copy
    for package in ("raypipe", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / package, work / package, ignore=ignored)
    (work / "tiny.yaml").write_text(CONFIG)
    with namespaces.network(tmp_path_factory.mktemp("hosts")) as net:
        yield Cluster(net, work)


@pytest.fixture(scope="module")
def alone(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed run on the head alone."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    process = cluster.raypipe_submit(folder, "")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert len(_table(folder, "environment")) == 1
    return folder


@pytest.mark.parametrize(
    ("nodes", "submit", "remove"),
    [
        pytest.param(2, Cluster.ray_job_submit, Host.power_off, id="two"),
        pytest.param(4, Cluster.raypipe_submit, Host.unplug, id="four"),
    ],
)
def test_a_node_goes_away(
    cluster: Cluster,
    alone: Path,
    tmp_path: Path,
    nodes: int,
    submit: Submit,
    remove: Callable[[Host], None],
) -> None:
    others = [cluster.add() for _ in range(nodes - 1)]
    folder = tmp_path / "run"
    try:
        process = submit(cluster, folder, SLOWLY)
        _wait_until(lambda: _evaluations(folder) >= 6, "values are stored", process)
        remove(others[0])
        removed_at = _evaluations(folder)
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        for host in others:
            host.power_off()
    assert process.returncode == 0, output
    print(output)
    assert removed_at < len(_table(folder, "evaluations")), "it was over before"
    names = {host.name for host in (cluster.head, *others)}
    assert set(_table(folder, "environment")["hostname"]) == names
    stages = _table(folder, "stages")
    assert set(stages["stage"]) == STAGES
    assert set(stages["status"]) == {"succeeded"}
    assert_same(folder, alone)


def assert_same(folder: Path, alone: Path) -> None:
    """Every unit once, with the values of the undisturbed run."""
    for name, columns in {
        "study_history": ["dataset", "optimizer", "run", "evaluation", "batch", "T", "value"],
        "evaluations": ["dataset", "seed", "T", "value"],
        "steps": ["trial_id", "step", "loss", "lr"],
        "trials": ["trial_id", "status", "steps", "loss_final"],
    }.items():
        found, expected = (
            _table(each, name)[columns].sort_values(columns[:4]).reset_index(drop=True)
            for each in (folder, alone)
        )
        pd.testing.assert_frame_equal(found, expected, obj=name)


def _table(folder: Path, name: str) -> pd.DataFrame:
    return read_table(RunDirectory.at(folder), name)


def _evaluations(folder: Path) -> int:
    lines = (file.read_bytes() for file in folder.glob("ledger/*.jsonl"))
    return sum(content.count(b'"table": "evaluations"') for content in lines)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_until(
    happened: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None
) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        if process is not None:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"not in {WAIT_S} s: {what}"
        time.sleep(0.1)
