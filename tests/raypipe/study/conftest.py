"""The hill: an experiment in a folder of its own, for matrices, searches and races."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.raypipe.examples import hills


@pytest.fixture
def hill(work: Path) -> Path:
    (work / "hill.py").write_text(hills.HILL)
    return work
