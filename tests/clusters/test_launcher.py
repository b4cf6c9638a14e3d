"""The cluster of ``raypipe init --aws``, brought up over SSH, and the main job on it.

Its machines are hosts made of namespaces, and they have the environment of the tests instead of
one that is downloaded; node types, file mounts and the commands that start Ray are the file's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raypipe.commands.cluster_files import text_of
from tests.clusters import main_job, namespaces
from tests.clusters.main_job import PROJECT, WAIT_S
from tests.clusters.main_job import work as work
from tests.clusters.namespaces import Host
from tests.clusters.provider import Machines, completed
from tests.command import finish, spawn, table, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REQUEST = """
import time, ray
from raypipe.launch.nodes import living_nodes
ray.init()
wait = ray.remote(num_cpus=0, resources={{"raypipe_tasks": 1.0}})(lambda: time.sleep(600))
waiting = [wait.remote() for _ in range({nodes})]
while len(living_nodes()) < 1 + {nodes}:
    time.sleep(1)
"""


class Launcher:
    """Machines with an SSH server each, and the commands of the launcher on them."""

    def __init__(self, net: namespaces.Network, folder: Path) -> None:
        self.folder = folder
        self._net, self.key = net, folder / "key"
        _keygen(self.key)
        state = folder / "machines.json"
        state.write_text("{}")
        module = "tests.clusters.provider.Machines"
        self.provider = {"type": "external", "module": module, "state": str(state)}
        self.cloud = Machines(self.provider, "raypipe")
        self.machines: dict[str, Host] = {}
        for name in ("head", "cpu-1", "cpu-2"):
            self.offer(name)
        (folder / "home/.ray").mkdir(parents=True)
        (folder / "home/.ray/auth_token").write_text(main_job.TOKEN)
        own = {"HOME": str(folder / "home"), "PYTHONPATH": str(PROJECT)}
        self._environment = main_job.ENVIRONMENT | own

    def offer(self, name: str) -> None:
        """One more machine that can be had."""
        host = self.machines[name] = self._net.host({"RAY_AUTH_MODE": "token"})
        _keygen(host.folder / "host_key")
        (host.home / ".bashrc").write_text(
            f"export PYTHONPATH={PROJECT} RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1\n"
        )
        host.run("mkdir", "-p", "/run/sshd")
        files = ("-f", "/dev/null", "-h", host.folder / "host_key", "-E", host.folder / "sshd.log")
        options = (f"-oAuthorizedKeysFile={self.key}.pub", "-oStrictModes=no", "-oPidFile=none")
        host.run("/usr/sbin/sshd", *files, *options)
        self.cloud.offer(host.address, name.partition("-")[0])

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """A command of the user."""
        return spawn(PROJECT, *words, environment=self._environment)

    def run(self, *words: str | Path) -> str:
        """What a command of the user prints."""
        return finish(self.start(*words), within_s=WAIT_S)

    def running(self) -> int:
        """How many machines are paid for."""
        return len(self.cloud.non_terminated_nodes({}))

    def request(self, nodes: int) -> None:
        """So many cpu nodes, as raypipe asks for lost ones, until they are there."""
        self.machines["head"].run(sys.executable, "-c", REQUEST.format(nodes=nodes))


def _keygen(path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(words, check=True)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    tools = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "rsync")
    with namespaces.network(tmp_path_factory.mktemp("hosts"), *tools) as net:
        yield Launcher(net, tmp_path_factory.mktemp("launcher"))


@pytest.fixture(scope="module")
def cluster(launcher: Launcher) -> Iterator[Path]:
    """The file of a cluster that is up, with the least of its nodes: ours for these machines."""
    # Ray fills in nothing for a provider of ours
    given = completed(yaml.safe_load(text_of("cluster.yaml", "aws", {}, PROJECT)))
    given |= {"provider": launcher.provider, "head_setup_commands": []}
    given["auth"] = {"ssh_user": "root", "ssh_private_key": str(launcher.key)}
    for name, kind in given["available_node_types"].items():
        kind["node_config"] = {"type": name}
        kind["resources"] = {"CPU": 1} | dict.fromkeys(kind["resources"], 1)
    gpu = given["available_node_types"]["gpu"]
    gpu |= {"min_workers": 0, "resources": {"CPU": 1, "GPU": 1}}
    environment = Path(sys.executable).parents[1]
    last = given["setup_commands"][-1]
    given["setup_commands"] = [f"ln -sfn {environment} ~/raypipe-env", last]
    file = launcher.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(given))
    shown = launcher.run("ray", "up", "--yes", "--no-config-cache", file)
    assert "Ray runtime started" in shown, shown
    until(lambda: launcher.running() == 2, "the least of the cpu nodes runs", WAIT_S)
    yield file
    launcher.run("ray", "down", "--yes", file)
    assert not launcher.running()


def submit(cluster: Path, work: Path, run: str, faults: str = "") -> list[str | Path]:
    """On the head, since the dashboard listens on its own address 127.0.0.1 alone."""
    variables = json.dumps({"env_vars": {"RAYPIPE_FAULTS": faults}})
    job = f"ray job submit --working-dir {work} --runtime-env-json '{variables}' -- {run}"
    return ["ray", "exec", "--no-config-cache", cluster, job]


def test_the_main_job_on_a_cluster_that_grows(
    launcher: Launcher, cluster: Path, work: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = f"raypipe run tiny.yaml --run-dir {folder}"
    shown = launcher.run(*submit(cluster, work, command, "delay_task:s=2"))
    assert "done: " in shown, shown
    main_job.assert_whole(folder)
    evaluated = table(folder, "evaluations")["worker"]
    workers = {name.partition(":")[0] for name in evaluated}
    # on the nodes for tasks alone, on the one that came because of them too
    assert workers == {launcher.machines[name].name for name in ("cpu-1", "cpu-2")}
    (log,) = launcher.machines["head"].folder.glob("ray/session_2*/logs/monitor.log")
    assert "nodes of type cpu" in log.read_text()
    assert "nodes of type gpu" not in log.read_text()


def test_what_is_taken_away_comes_again(
    launcher: Launcher, cluster: Path, work: Path, tmp_path: Path
) -> None:
    """A training on three nodes; without it the autoscaler is content with two."""
    launcher.request(2)
    folder = tmp_path / "run"
    keys = ["training.steps=200", "training.log_every=1", "training.checkpoint_every=20"]
    keys += ["scaling.workers=3", "pabbo.policy_batch=3"]
    overrides = " ".join(f"train_small.{each}" for each in keys)
    command = f"raypipe run tiny.yaml --only train_small --run-dir {folder} {overrides}"
    process = launcher.start(*submit(cluster, work, command))
    until(lambda: any(folder.glob("checkpoints/train_small/step_*")), "it trains", WAIT_S, process)
    spot = launcher.machines["cpu-2"]
    spot.power_off()
    launcher.cloud.terminate_node(spot.address)
    launcher.offer("cpu-3")
    finish(process, within_s=WAIT_S)
    assert set(table(folder, "failures")["kind"]) == {"node_lost"}
    assert sorted(table(folder, "steps")["step"]) == list(range(1, 201))
    assert launcher.running() == 3
    launcher.offer("cpu-4")
    launcher.request(3)
    assert launcher.running() == 4
