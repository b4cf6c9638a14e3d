"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# tests, workers and commands share the cores; read when torch and numpy are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real corpora, or a skip where this machine has none."""
    folder = Path(os.environ.get("RAYPIPE_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("real data not found: set RAYPIPE_DATA to the folder that holds it")
    return folder
