"""A SLURM of its own: a controller and two nodes, each with a network of its own."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.clusters import namespaces
from tests.command import spawn, until

NODES = ("n1", "n2")
_CONFIGURATION = """
ClusterName=rehearsal
SlurmctldHost={host}({controller})
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
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


class Job(NamedTuple):
    """What the controller knows of a job, and what the job wrote."""

    id: str
    state: str
    status: int
    restarts: int
    log: str


class Slurm:
    """The controller and the nodes, whose daemons end with the stack."""

    def __init__(self, folder: Path, network: namespaces.Network, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        places = {name: network.namespace() for name in ("ctl", *NODES)}
        # not `ip netns exec`, which hides /sys/fs/cgroup
        self._inside = {
            name: ["nsenter", f"--net=/run/netns/{place}"] for name, (place, _) in places.items()
        }
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        _configure(folder, {name: address for name, (_, address) in places.items()})
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        options = [f"--{name}={folder}/munge.{name}" for name in files]
        self._daemon("munged", "munged", "--foreground", "--force", *options)
        until((folder / "munge.socket").exists, "munged listens")
        self._daemon("slurmctld", *self._inside["ctl"], "slurmctld", "-D")
        for node in NODES:
            self._daemon(node, *self._inside[node], "slurmd", "-D", "-N", node)
        until(self._idle, "both nodes are idle", 60)

    def clear(self) -> None:
        """No job is left, also where a test failed."""
        self.ask("scancel", "--user=root")
        until(lambda: not self.ask("squeue", "-h"), "no job is left", 90)

    def job(self, job: str) -> Job:
        """A job as it is now."""
        lines = self.ask("scontrol", "show", "job", "-o", job)
        fields = dict(word.partition("=")[::2] for word in lines.split(" ") if "=" in word)
        log, status = Path(fields["StdOut"]), int(fields["ExitCode"].partition(":")[0])
        text = log.read_text() if log.exists() else ""
        return Job(job, fields["JobState"], status, int(fields["Restarts"]), text)

    def ended(self, job: str) -> Job:
        """A job once it has ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        log = lambda: self.job(job).log  # noqa: E731
        until(lambda: self.job(job).state in over, f"job {job} ends", 300, detail=log)
        until(self._idle, "the nodes are idle again", 60)
        return self.job(job)

    def _idle(self) -> bool:
        return set(self.ask("sinfo", "-h", "-N", "-o", "%t").split()) == {"idle"}

    def ask(
        self, *words: str, cwd: Path | None = None, extra: Mapping[str, str] | None = None
    ) -> str:
        """A command of SLURM, and what it prints."""
        done = subprocess.run(
            [*self._inside["ctl"], *words], cwd=cwd, env={**self._environment, **(extra or {})},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr}")
        return done.stdout.strip()

    def start(self, *words: str, cwd: Path, extra: Mapping[str, str]) -> subprocess.Popen[str]:
        """A command beside the controller."""
        return spawn(cwd, *self._inside["ctl"], *words, environment={**self._environment, **extra})

    def _daemon(self, name: str, *words: str) -> None:
        # a log of its own, since what it prints at once says why it did not start
        out = self._stack.enter_context((self._folder / f"{name}.out").open("wb"))
        process = subprocess.Popen(
            words, env=self._environment, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._stack.callback(_end, process)


@contextmanager
def started(folder: Path) -> Iterator[Slurm]:
    """A SLURM that leaves no process and no namespace behind; a skip where none can be started."""
    tools = ("slurmctld", "slurmd", "munged", "sbatch")
    with namespaces.network(folder, *tools) as network, ExitStack() as stack:
        slurm = Slurm(folder, network, stack)
        yield slurm
        slurm.clear()


def _configure(folder: Path, addresses: Mapping[str, str]) -> None:
    host = socket.gethostname()
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr={addresses[node]} CPUs=2 "
        f"RealMemory=8000 Gres=gpu:1"
        for node in NODES
    ]
    text = _CONFIGURATION.format(
        host=host, controller=addresses["ctl"], folder=folder, nodes="\n".join(lines)
    )
    (folder / "slurm.conf").write_text(text)
    # no GPU is needed where nobody computes on it: what SLURM and Ray count is the number
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key-file"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    process.kill()
    process.wait()
