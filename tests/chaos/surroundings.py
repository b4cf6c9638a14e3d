"""What a run stands on, made for a round: nodes of a cluster, a disk, a clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.chaos.scene import MARK
from tests.command import until

# a node that does not answer is given up after some ten seconds
_SETTINGS = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 3,
}
_NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


@contextmanager
def two_nodes(name: str) -> Iterator[Cluster]:
    """A cluster of two nodes with small object stores, for commands to attach to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, name)
        head = {**_NODE, "_system_config": _SETTINGS}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            add_node(cluster)
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Cluster) -> Any:
    """One more node."""
    return cluster.add_node(**_NODE)


def assert_stores_empty(cluster: Cluster) -> None:
    """Wait until no object lies in the store of any node."""
    words = ["ray", "memory", "--stats-only", "--address", cluster.address]

    def used() -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    empty = "Plasma memory usage 0 MiB, 0 objects"
    until(lambda: empty in used(), "the object stores are empty", 60, detail=used)


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A folder that is a small disk of its own, where the user may mount one."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        yield folder
        return
    _mount("-t", "tmpfs", "-o", "size=64m", "raypipe-chaos", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Not a byte is left on the disk."""
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as stream:
            for size in (1 << 20, 1):
                try:
                    while stream.write(bytes(size)):
                        pass
                except OSError:
                    continue
        yield
    finally:
        ballast.unlink()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be written to the disk; who writes already keeps this from happening."""
    _mount("-o", "remount,ro", folder)
    try:
        yield
    finally:
        _mount("-o", "remount,rw", folder)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def clock(folder: Path, compiler: str) -> tuple[Callable[[int], None], dict[str, str]]:
    """Environment variables that set the time of day back for a process."""
    library, offset = folder / "clock.so", folder / "clock"
    source = Path(__file__).with_name("clock.c")
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(words, check=True)
    offset.write_bytes(bytes(8))

    def set_back(seconds: int) -> None:
        with offset.open("r+b") as stream:  # in place: they have it mapped
            stream.write((-seconds).to_bytes(8, sys.byteorder, signed=True))

    return set_back, {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(offset)}


_FILL = """
import sys, time, numpy, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
kept = [ray.put(numpy.zeros(2_500_000)) for _ in range(16)]
print("full", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def store_filled(cluster: Cluster, name: str) -> Iterator[None]:
    """Somebody else holds more objects than a node has memory for: Ray spills them to its disk."""
    words = [sys.executable, "-c", _FILL, cluster.address, "600"]
    environment = {**os.environ, MARK: name}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "full\n"
            yield
        finally:
            process.kill()
