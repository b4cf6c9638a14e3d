"""A real S3 server of this machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs as arrow_fs

from raypipe.store.run_directory import RunDirectory


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The ``host:port`` of a server with the buckets ``runs`` and ``unconditional``."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("the package moto[server] is not installed")
    script = Path(__file__).with_name("s3_server.py")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        store = arrow_fs.S3FileSystem(
            access_key="key",
            secret_key="any",
            endpoint_override=address,
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )
        store.create_dir("runs")
        store.create_dir("unconditional")
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["run", "remote"])
def anywhere(request: pytest.FixtureRequest) -> RunDirectory:
    """A run directory on a local file system, and one on another."""
    found: RunDirectory = request.getfixturevalue(request.param)
    return found
