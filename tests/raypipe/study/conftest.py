"""The hill: an experiment in a folder of its own, for matrices, searches and races."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.raypipe.examples import hills


@pytest.fixture
def hill(work: Path) -> Iterator[Path]:
    (work / "hill.py").write_text(hills.HILL)
    yield work
    sys.modules.pop("hill", None)
