"""``cluster.yaml`` brought up by Ray's launcher over SSH, and the main job on it.

Its machines are hosts made of namespaces, and they have the environment of the tests instead of
one that is downloaded; node types, file mounts and the commands that start Ray are the file's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.providers import _get_default_config

from tests.clusters import main_job, namespaces
from tests.clusters.main_job import PROJECT, WAIT_S, wait_until
from tests.clusters.namespaces import Host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TOKEN = "0123456789abcdef" * 4
SSHD = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {keys}.pub
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
"""


class Launcher:
    """Machines with an SSH server each, and the commands of the launcher on them."""

    def __init__(self, net: namespaces.Network, folder: Path) -> None:
        self.folder = folder
        self._key = folder / "key"
        _keygen(self._key)
        self.machines = {kind: net.host() for kind in ("head", "cpu-1", "cpu-2")}
        state = {
            host.address: {"type": kind.partition("-")[0], "running": False, "tags": {}}
            for kind, host in self.machines.items()
        }
        self.state = folder / "machines.json"
        self.state.write_text(json.dumps(state))
        for host in self.machines.values():
            self._serve(host)
        (folder / "home/.ray").mkdir(parents=True)
        (folder / "home/.ray/auth_token").write_text(TOKEN)
        self._environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @property
    def head(self) -> Host:
        return self.machines["head"]

    def _serve(self, host: Host) -> None:
        _keygen(host.folder / "host_key")
        text = SSHD.format(folder=host.folder, keys=self._key)
        (host.folder / "sshd_config").write_text(text)
        (host.home / ".bashrc").write_text(
            f"export PYTHONPATH={PROJECT} RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1\n"
        )
        host.run("mkdir", "-p", "/run/sshd")
        host.run(
            "/usr/sbin/sshd", "-f", host.folder / "sshd_config", "-E", host.folder / "sshd.log"
        )

    def configuration(self) -> Path:
        """``cluster.yaml`` for these machines."""
        cluster = yaml.safe_load((PROJECT / "cluster.yaml").read_text())
        cluster = _get_default_config({"type": "aws"}) | cluster  # a provider of ours has none
        module = "tests.clusters.provider.Machines"
        cluster["provider"] = {"type": "external", "module": module, "state": str(self.state)}
        cluster["auth"] = {"ssh_user": "root", "ssh_private_key": str(self._key)}
        for name, kind in cluster["available_node_types"].items():
            kind["node_config"] = {"type": name}
            kind["resources"] = {"CPU": 1} | dict.fromkeys(kind["resources"], 1)
        cluster["available_node_types"]["gpu"] |= {"min_workers": 0}
        environment = Path(sys.executable).parents[1]
        last = cluster["setup_commands"][-1]
        cluster["setup_commands"] = [f"ln -sfn {environment} ~/raypipe-env", last]
        cluster["head_setup_commands"] = []
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(cluster))
        return path

    def run(self, *words: str | Path, folder: Path = PROJECT, wait_s: float = 600) -> str:
        """What a command of the user prints; it has to succeed."""
        done = subprocess.run(
            list(map(str, words)),
            cwd=folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=wait_s,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}\n{self._logs()}"
        return done.stdout

    def _logs(self) -> str:
        logs = sorted(self.head.folder.glob("ray/session_2*/logs/monitor*"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in logs)


def _keygen(path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(words, check=True)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    namespaces.require()
    for tool in ("/usr/sbin/sshd", "ssh", "ssh-keygen", "rsync"):
        if shutil.which(tool) is None:
            pytest.skip(f"the cluster launcher's machines need {tool} (openssh-server, rsync)")
    with namespaces.network(tmp_path_factory.mktemp("hosts")) as net:
        yield Launcher(net, tmp_path_factory.mktemp("launcher"))


def test_the_main_job_on_a_cluster_that_grows(launcher: Launcher, tmp_path: Path) -> None:
    cluster = launcher.configuration()
    shown = launcher.run("ray", "up", "--yes", "--no-config-cache", cluster)
    print(shown)
    assert "Ray runtime started" in shown, shown
    wait_until(lambda: len(_running(launcher)) == 2, "the least of the cpu nodes runs")
    work = tmp_path / "work"
    work.mkdir()
    main_job.write(work)
    folder = tmp_path / "run"
    # as `ray exec` does it: the dashboard listens on the head's own address 127.0.0.1 alone
    submit = ("ray", "job", "submit", "--working-dir", str(work), "--runtime-env-json")
    faults = json.dumps({"env_vars": {"RAYPIPE_FAULTS": "delay_task:s=2"}})
    command = f"raypipe run tiny.yaml --run-dir {folder}"
    words = " ".join([*submit, f"'{faults}'", "--", command])
    shown = launcher.run("ray", "exec", "--no-config-cache", cluster, words, wait_s=WAIT_S)
    print(shown)
    assert "done: " in shown, shown
    main_job.assert_whole(folder)
    evaluated = main_job.table(folder, "evaluations")["worker"]
    workers = {name.partition(":")[0] for name in evaluated}
    # on the nodes for tasks alone, on the one that came because of them too
    assert workers == {launcher.machines[kind].name for kind in ("cpu-1", "cpu-2")}
    (log,) = launcher.head.folder.glob("ray/session_2*/logs/monitor.log")
    assert "nodes of type cpu" in log.read_text()
    assert "nodes of type gpu" not in log.read_text()
    launcher.run("ray", "down", "--yes", cluster)
    assert not _running(launcher)


def _running(launcher: Launcher) -> list[str]:
    machines = json.loads(launcher.state.read_text())
    return [address for address, machine in machines.items() if machine["running"]]
