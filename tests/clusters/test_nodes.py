"""The main job on clusters of two and four nodes, one of which goes away in the middle."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from tests.clusters import main_job, namespaces
from tests.clusters.main_job import WAIT_S, stored_evaluations
from tests.clusters.main_job import work as work
from tests.clusters.namespaces import Host, Network
from tests.command import finish, listens, spawn, table, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SLOWLY = "delay_task:s=1"
# a node that does not answer is given up after some ten seconds
ENVIRONMENT = {
    **main_job.ENVIRONMENT,
    "RAY_AUTH_TOKEN": main_job.TOKEN,
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
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
        until(lambda: listens(address, 8265), "the dashboard listens", WAIT_S)

    def add(self) -> Host:
        """One more node."""
        host = self._net.host(ENVIRONMENT)
        host.run("ray", "start", f"--address={self.head.address}:6379", *NODE)
        return host

    def ray_job_submit(self, folder: Path, faults: str) -> Popen[str]:
        """As the documentation of Ray has it."""
        variables = json.dumps({"env_vars": {"RAYPIPE_FAULTS": faults}})
        submit = ("ray", "job", "submit", "--address", self.dashboard, "--working-dir", ".")
        command = ("raypipe", "run", "tiny.yaml", "--run-dir", str(folder))
        return self.start(*submit, "--runtime-env-json", variables, "--", *command)

    def raypipe_submit(self, folder: Path, *more: str, **environment: str) -> Popen[str]:
        """As ours has it."""
        words = ("-m", "raypipe", "submit", "tiny.yaml", "--address", self.dashboard)
        given = (*words, "--run-dir", str(folder), *more)
        return self.start(sys.executable, *given, **environment)

    def start(self, *words: str, **environment: str) -> Popen[str]:
        """A command of the user."""
        return spawn(self._work, *words, environment={**ENVIRONMENT, **environment})


@pytest.fixture(scope="module")
def cluster(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with namespaces.network(tmp_path_factory.mktemp("hosts")) as net:
        yield Cluster(net, work)


@pytest.fixture(scope="module")
def alone(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed run on the head alone."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    process = cluster.raypipe_submit(folder)
    finish(process, within_s=WAIT_S)
    assert len(table(folder, "environment")) == 1
    return folder


@pytest.mark.parametrize(("nodes", "remove"), [(2, Host.power_off), (4, Host.unplug)])
def test_a_node_goes_away(
    cluster: Cluster, alone: Path, tmp_path: Path, nodes: int, remove: Callable[[Host], None]
) -> None:
    others = [cluster.add() for _ in range(nodes - 1)]
    folder = tmp_path / "run"
    try:
        process = cluster.ray_job_submit(folder, SLOWLY)
        until(lambda: stored_evaluations(folder) >= 6, "values are stored", WAIT_S, process)
        remove(others[0])
        removed_at = stored_evaluations(folder)
        finish(process, within_s=WAIT_S)
    finally:
        for host in others:
            host.power_off()
    assert removed_at < len(table(folder, "evaluations")), "it was over before"
    names = {host.name for host in (cluster.head, *others)}
    assert set(table(folder, "environment")["hostname"]) == names
    main_job.assert_whole(folder)
    main_job.assert_same(main_job.outcome(folder), main_job.outcome(alone))


def test_a_stopped_job_ends_in_order_and_is_continued(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick = ("lda.optimizers=[ga,tpe]", "--only", "lda")
    process = cluster.raypipe_submit(folder, *quick, RAYPIPE_FAULTS=SLOWLY)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    job = next(filter(None, (re.search(r"^job (\S+) on ", line) for line in lines)))
    until(lambda: stored_evaluations(folder) >= 2, "values are stored", WAIT_S, process)
    stop = cluster.start("ray", "job", "stop", "--address", cluster.dashboard, job[1])
    finish(stop, within_s=WAIT_S)  # it waits for the end
    output = finish(process, 130, WAIT_S)
    assert "interrupted; finished units are kept" in output
    assert table(folder, "stages").set_index("stage")["status"]["lda"] == "interrupted"
    finish(cluster.raypipe_submit(folder, *quick), within_s=WAIT_S)
    assert not table(folder, "evaluations").duplicated(["dataset", "seed", "T"]).any()
    assert set(table(folder, "studies")["unique_evaluations"]) == {8}


def test_without_the_token_nothing_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.raypipe_submit(tmp_path / "run", RAY_AUTH_TOKEN="f" * 64)
    output = finish(process, 2, WAIT_S)
    assert "asks for a token" in output
    assert "Traceback" not in output
