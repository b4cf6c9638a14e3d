"""Hosts made of namespaces: each with an address, a name, processes and a home of its own.

They share the file system of this machine, as nodes share a network file system; ``/tmp/ray`` and
``/dev/shm`` are each host's own. To kill the first process of a host is to cut its power.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.command import finish, spawn, until

_BITS = 24
_SHM_MB = 200
# the first process of a host: it collects the children that others leave behind
_INIT = """
set -e
hostname {name}
mkdir -p {folder}/ray {folder}/home /tmp/ray
mount --bind {folder}/ray /tmp/ray
mount -t tmpfs -o size={shm}m tmpfs /dev/shm
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/hosts /etc/hosts
touch {folder}/ready
trap : TERM
sleep infinity &
while :; do wait || :; done
"""


def require() -> None:
    """Skip where there is no root, or not the tools, to make namespaces."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"network namespaces need {tool} (Debian: iproute2, util-linux)")


@dataclass
class Host:
    """A host that runs."""

    name: str
    address: str
    folder: Path
    first: subprocess.Popen[bytes]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def run(self, *words: str | Path) -> str:
        """What a command prints on the host; it has to succeed."""
        enter = ["nsenter", f"--target={self._pid()}", "--net", "--mount", "--uts", "--pid"]
        own = {**self.environment, "HOME": str(self.home)}
        here = Path.cwd()
        return finish(spawn(here, *enter, f"--wd={here}", *words, environment=own), within_s=400)

    def power_off(self) -> None:
        """SIGKILL to every process at once."""
        if self.first.poll() is None:
            os.kill(self._pid(), signal.SIGKILL)
            self.first.wait()

    def unplug(self) -> None:
        """Nothing gets in or out any more; the processes go on."""
        _ip("link", "set", _cable(self.name), "down")

    def _pid(self) -> int:
        children = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text()
        return int(children.split()[0])


class Network:
    """A bridge, and the hosts on it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._bridge = f"rp{os.getpid()}"
        self._subnet = _free_subnet()
        _ip("link", "add", self._bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", self._bridge)
        _ip("addr", "add", f"{self._subnet}.1/{_BITS}", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        self._made = 0

    def host(self, environment: Mapping[str, str] | None = None) -> Host:
        """One more host."""
        self._made += 1
        name, address = f"{self._bridge}n{self._made}", f"{self._subnet}.{10 + self._made}"
        folder = self._folder / name
        folder.mkdir()
        passwd = Path("/etc/passwd").read_text().splitlines()
        fields = next(line for line in passwd if line.startswith("root:")).split(":")
        fields[5] = str(folder / "home")
        others = [line for line in passwd if not line.startswith("root:")]
        (folder / "passwd").write_text("\n".join([":".join(fields), *others, ""]))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        cable = _cable(name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        # the kernel takes its time over what a namespace without a name held
        self._stack.callback(_ip, "link", "del", cable)
        _ip("link", "set", cable, "master", self._bridge, "up")
        for words in (
            ("addr", "add", f"{address}/{_BITS}", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", f"{self._subnet}.1"),
        ):
            _ip("-n", name, *words)
        script = _INIT.format(name=name, folder=folder, shm=_SHM_MB)
        isolate = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "first.log").open("wb") as log:
            words = ["ip", "netns", "exec", name, *isolate, "bash", "-c", script]
            first = subprocess.Popen(words, stdout=log, stderr=log)
        host = Host(name, address, folder, first, dict(environment or {}))
        self._stack.callback(_end, first)
        self._stack.callback(host.power_off)
        log = folder / "first.log"
        until((folder / "ready").exists, f"{name} starts", 30, detail=log.read_text)
        return host


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A network whose hosts are gone in the end, whatever happened."""
    with ExitStack() as stack:
        yield Network(folder, stack)


def _cable(name: str) -> str:
    return f"{name}v"


def _end(first: subprocess.Popen[bytes]) -> None:
    first.kill()
    first.wait()


def _free_subnet() -> str:
    used = {
        entry["local"].rpartition(".")[0]
        for link in json.loads(_ip("-j", "-4", "addr"))
        for entry in link["addr_info"]
    }
    return next(net for number in range(256) if (net := f"10.213.{number}") not in used)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
