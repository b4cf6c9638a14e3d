"""Hosts made of namespaces: each with an address, a name, processes and a home of its own.

They share the file system of this machine, as nodes share a network file system; ``/tmp/ray`` and
``/dev/shm`` are each host's own. To kill the first process of a host is to cut its power.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command import finish, spawn, until

# the first process of a host: it collects the children that others leave behind
_INIT = """
set -e
hostname {name}
mkdir -p {folder}/ray {folder}/home /tmp/ray
mount --bind {folder}/ray /tmp/ray
mount -t tmpfs -o size=200m tmpfs /dev/shm
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/hosts /etc/hosts
touch {folder}/ready
trap : TERM
sleep infinity &
while :; do wait || :; done
"""


@dataclass
class Host:
    """A host that runs."""

    name: str
    address: str
    folder: Path
    first: subprocess.Popen[bytes]
    environment: Mapping[str, str]

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
    """A bridge, and the namespaces and hosts on it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._bridge, self._subnet = f"rp{os.getpid()}", _free_subnet()
        _ip("link", "add", self._bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", self._bridge)
        _ip("addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        self._made = 0

    def namespace(self) -> tuple[str, str]:
        """The name and the address of one more network namespace."""
        self._made += 1
        name, address = f"{self._bridge}n{self._made}", f"{self._subnet}.{10 + self._made}"
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        cable = _cable(name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        # the kernel takes its time over what a namespace without a name held
        self._stack.callback(_ip, "link", "del", cable)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return name, address

    def host(self, environment: Mapping[str, str]) -> Host:
        """One more host."""
        name, address = self.namespace()
        _ip("-n", name, "route", "add", "default", "via", f"{self._subnet}.1")
        folder = self._folder / name
        folder.mkdir()
        passwd = Path("/etc/passwd").read_text()
        home = pwd.getpwuid(0).pw_dir
        (folder / "passwd").write_text(passwd.replace(f":{home}:", f":{folder}/home:"))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        script = _INIT.format(name=name, folder=folder)
        isolate = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        log = folder / "first.log"
        with log.open("wb") as stream:
            words = ["ip", "netns", "exec", name, *isolate, "bash", "-c", script]
            first = subprocess.Popen(words, stdout=stream, stderr=stream)
        host = Host(name, address, folder, first, environment)
        self._stack.callback(first.wait)
        self._stack.callback(first.kill)
        self._stack.callback(host.power_off)
        until((folder / "ready").exists, f"{name} starts", 30, detail=log.read_text)
        return host


@contextmanager
def network(folder: Path, *tools: str) -> Iterator[Network]:
    """A network; its hosts are removed at the end, also after an error.

    The test is skipped where there is no root, or not the programs, to make namespaces; or not
    those that are named.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "unshare", "nsenter", *tools):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing (Debian: iproute2, util-linux, slurmctld, rsync, ...)")
    with ExitStack() as stack:
        yield Network(folder, stack)


def _cable(name: str) -> str:
    return f"{name}v"


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
