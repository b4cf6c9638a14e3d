"""A real S3 server of this machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs as arrow_fs

from raypipe.store.lock import Pace
from raypipe.store.run_directory import RunDirectory

#: as the real one, but for its speed
FAST = Pace(beat_s=0.1, expiry_s=2)


def uri_of(server: str, name: str, user: str = "key:any@", bucket: str = "runs") -> str:
    """A run directory in a bucket of the server."""
    return f"s3://{user}{bucket}/{name}?endpoint_override={server}&scheme=http&region=us-east-1"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The ``host:port`` of a server with the buckets ``runs`` and ``unconditional``."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("the package moto[server] is not installed")
    words = [sys.executable, Path(__file__).with_name("s3_server.py")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(words, **options)
    try:
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
    return request.getfixturevalue(request.param)
