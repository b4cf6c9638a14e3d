"""One Ray cluster for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raypipe.launch.cluster import RayLauncher

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def launcher() -> Iterator[RayLauncher]:
    here = Path.cwd()
    assert here == PROJECT, f"run the tests from {PROJECT}"
    launcher = RayLauncher()
    yield launcher
    launcher.close()
