"""The cluster of the tutorial, for real: a head with tokens, a run on it, and a job."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import listens, until
from tests.docs.pages import DOCS, Reader, blocks, files_before

PAGE = DOCS / "tutorial" / "cluster.md"
GCS, DASHBOARD = "6379", "8265"  # Ray's ports, which the page names

pytestmark = pytest.mark.slow


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """A cluster as the page starts it, on free ports: ports by the page's, and the environment."""
    gcs, dashboard, client, agent = free_ports(4)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as folder:
        options = {
            "--port": gcs,
            "--num-cpus": "2",
            "--dashboard-host": "127.0.0.1",
            "--dashboard-port": dashboard,
            "--ray-client-server-port": client,
            "--dashboard-agent-listen-port": agent,
            "--temp-dir": folder,
            "--object-store-memory": "100000000",
        }
        process = subprocess.Popen(
            ["ray", "start", "--head", "--block", *chain.from_iterable(options.items())],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            for port in map(int, (gcs, dashboard)):
                until(partial(listens, "127.0.0.1", port), f"port {port} is taken", 120)
            yield {GCS: gcs, DASHBOARD: dashboard}, environment
        finally:
            process.send_signal(signal.SIGTERM)  # it ends the processes that it has started
            try:
                process.wait(60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def test_the_commands_of_the_page(head, tmp_path):
    ports, environment = head
    reader = Reader(tmp_path)
    for block in files_before(PAGE):
        reader.follow(block)
    ran = [block for block in blocks(PAGE) if "\nraypipe " in block.text]
    assert len(ran) == 2
    for block in ran:
        text = block.text
        for written, port in ports.items():
            assert written in PAGE.read_text("utf-8")
            text = text.replace(f":{written}", f":{port}")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, f"{block.place}\n{done.stdout}{done.stderr}"
    for name in ("out", "job"):
        trial = read_table(RunDirectory.at(tmp_path / name), "trials").iloc[0]
        assert (trial["status"], trial["steps"]) == ("succeeded", 200)
