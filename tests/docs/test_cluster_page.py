"""The cluster of the tutorial, for real: every command of the page, on a host of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.clusters import namespaces
from tests.command import table
from tests.docs.pages import DOCS, Reader, blocks, files_before

PAGE = DOCS / "tutorial" / "cluster.md"


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, tmp_path_factory):
    reader = Reader(tmp_path)
    for block in files_before(PAGE):
        reader.follow(block)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shells = [block.text for block in blocks(PAGE) if block.language == "bash"]
    assert len(shells) == 4
    with namespaces.network(tmp_path_factory.mktemp("hosts")) as net:
        host = net.host({"PATH": path, "RAY_AUTH_MODE": "token"})
        for shell in shells:
            script = f"cd {tmp_path}\n{shell}"
            host.run("bash", "-euo", "pipefail", "-c", script)
    for name in ("out", "job"):
        trial = table(tmp_path / name, "trials").iloc[0]
        assert (trial["status"], trial["steps"]) == ("succeeded", 200)
