"""A SLURM of its own: a controller and two nodes, each with a network of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.command import until

NODES = ("n1", "n2")
_NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter")
_ADMIN = f"/usr/sbin:/sbin:{os.environ['PATH']}"
# addresses set aside for tests of networks (RFC 2544), seen in these namespaces only
_CONTROLLER = "198.18.0.1"
_CONFIGURATION = """
ClusterName=rehearsal
SlurmctldHost={host}({controller})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
# which a site may forbid; the script asks for it
JobRequeue=0
GresTypes=gpu
{nodes}
PartitionName=cpu Nodes=ALL Default=YES
PartitionName=gpu Nodes=n2
"""


def missing() -> str | None:
    """Why no SLURM can be started here; None where it can."""
    lacking = [name for name in _NEEDED if shutil.which(name, path=_ADMIN) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: install slurmctld, slurmd, munge and iproute2"
    if os.geteuid() != 0:
        return "only root can start slurmd"
    return None


@dataclass(frozen=True)
class Job:
    """What the controller knows of a job, and what the job wrote."""

    id: str
    fields: Mapping[str, str]
    log: str

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def status(self) -> int:
        return int(self.fields["ExitCode"].partition(":")[0])


class Slurm:
    """The daemons; a context manager that leaves no process and no namespace behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = {name: f"raypipe-{os.getpid()}-{name}" for name in ("ctl", *NODES)}
        self._stack = ExitStack()

    def __enter__(self) -> Slurm:
        with self._stack:
            self._network()
            self._configure()
            files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log",
                     "seed-file": "seed"}  # fmt: skip
            options = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
            self._daemon("munged", "munged", "--foreground", "--force", *options)
            until(lambda: (self.folder / "munge.socket").exists(), "munged listens")
            self._daemon("slurmctld", *self._inside("ctl"), "slurmctld", "-D")
            for node in NODES:
                self._daemon(node, *self._inside(node), "slurmd", "-D", "-N", node)
            until(self._idle, "both nodes are idle", 60)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            self.clear()

    def clear(self) -> None:
        """No job is left, also where a test failed."""
        self.ask("scancel", "--user=root")
        until(lambda: not self.ask("squeue", "-h"), "no job is left", 90)

    def submit(self, *words: str | Path, cwd: Path, environment: Mapping[str, str]) -> str:
        """``sbatch`` with these words; the job's id."""
        return self.ask("sbatch", "--parsable", *map(str, words), cwd=cwd, extra=environment)

    def job(self, job: str) -> Job:
        """A job as it is now."""
        lines = self.ask("scontrol", "show", "job", "-o", job)
        fields = dict(word.partition("=")[::2] for word in lines.split(" ") if "=" in word)
        log = Path(fields["StdOut"])
        return Job(job, fields, log.read_text() if log.exists() else "")

    def ended(self, job: str, within_s: float = 300) -> Job:
        """A job once it has ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.job(job).state in over, f"job {job} ends", within_s,
              detail=lambda: self.job(job).log)  # fmt: skip
        until(self._idle, "the nodes are idle again", 60)
        return self.job(job)

    def _idle(self) -> bool:
        return set(self.ask("sinfo", "-h", "-N", "-o", "%t").split()) == {"idle"}

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _ADMIN, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _inside(self, name: str) -> list[str]:
        # not `ip netns exec`, which hides /sys/fs/cgroup
        return ["nsenter", f"--net=/run/netns/{self._names[name]}"]

    def ask(
        self, *words: str, cwd: Path | None = None, extra: Mapping[str, str] | None = None
    ) -> str:
        """A command of SLURM, and what it prints."""
        done = subprocess.run(
            [*self._inside("ctl"), *words], cwd=cwd, env={**self._environment(), **(extra or {})},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr}")
        return done.stdout.strip()

    def _network(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], env=self._environment(), check=True)

        for name in self._names.values():
            ip("netns", "add", name)
            self._stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        controller = self._names["ctl"]
        ip("-n", controller, "link", "add", "bridge", "type", "bridge")
        ip("-n", controller, "addr", "add", f"{_CONTROLLER}/24", "dev", "bridge")
        ip("-n", controller, "link", "set", "bridge", "up")
        for number, node in enumerate(NODES):
            there = self._names[node]
            ip("-n", controller, "link", "add", node, "type", "veth",
               "peer", "name", "eth0", "netns", there)  # fmt: skip
            ip("-n", controller, "link", "set", node, "master", "bridge", "up")
            ip("-n", there, "addr", "add", f"{_address(number)}/24", "dev", "eth0")
            ip("-n", there, "link", "set", "eth0", "up")

    def _configure(self) -> None:
        host = socket.gethostname()
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr={_address(number)} CPUs=2 "
            f"RealMemory=8000 Gres=gpu:1"
            for number, node in enumerate(NODES)
        ]
        text = _CONFIGURATION.format(
            host=host, controller=_CONTROLLER, folder=self.folder, nodes="\n".join(lines)
        )
        (self.folder / "slurm.conf").write_text(text)
        # no GPU is needed where nobody computes on it: what SLURM and Ray count is the number
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _daemon(self, name: str, *words: str) -> None:
        # a log of its own, since what it prints at once says why it did not start
        out = self._stack.enter_context((self.folder / f"{name}.out").open("wb"))
        process = subprocess.Popen(
            words, env=self._environment(), stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._stack.callback(_end, process)


def _address(number: int) -> str:
    return f"198.18.0.{11 + number}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
