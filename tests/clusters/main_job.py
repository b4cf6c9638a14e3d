"""The main job in its smallest form, as a user submits it to a cluster."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest

from tests.command import table

PROJECT = Path(__file__).resolve().parents[2]
WAIT_S = 900
CONFIG = Path(__file__).with_name("tiny.yaml").read_text()
TOKEN = "0123456789abcdef" * 4
#: of commands of the user and of the hosts
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
STAGES = {"hardware", "train_small", "evaluate_small", "train_large", "evaluate_large"}
STAGES |= {"lda", "aggregate"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of which a job gets a copy: the packages and ``tiny.yaml``."""
    folder = tmp_path_factory.mktemp("work")
    for package in ("raypipe", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / package, folder / package, ignore=ignored)
    (folder / "tiny.yaml").write_text(CONFIG)
    return folder


def stored_evaluations(folder: Path) -> int:
    """How many values are in the ledger of a run that is under way."""
    files = (file.read_bytes() for file in folder.glob("ledger/*.jsonl"))
    lines = [line for content in files for line in content.splitlines()]
    return sum(line.count(b'"command_id"') for line in lines if b'"evaluations", "keys"' in line)


def assert_whole(folder: Path) -> None:
    """Every stage has succeeded, and every unit is there once."""
    stages = table(folder, "stages")
    assert set(stages["stage"]) == STAGES
    assert set(stages["status"]) == {"succeeded"}
    assert not table(folder, "evaluations").duplicated(["dataset", "seed", "T"]).any()
    assert len(table(folder, "studies")) == 10 * 2  # each optimizer with two seeds
    assert sorted(table(folder, "trials")["trial_id"]) == ["train_large", "train_small"]


def outcome(folder: Path, *more: str) -> dict[str, pd.DataFrame]:
    """What does not hang on time, place and the order of events, with more columns if asked for."""
    tables = {}
    for name, columns in {
        "study_history": ["dataset", "optimizer", "run", "evaluation", "batch", "T", "value"],
        "evaluations": ["dataset", "seed", "T", "value"],
        "steps": ["trial_id", "step", "loss", "lr"],
        "trials": ["trial_id", "status", "steps", "loss_final"],
    }.items():
        rows = table(folder, name)[[*columns, *more]]
        tables[name] = rows.sort_values([*columns[:4], *more]).reset_index(drop=True)
    return tables


def assert_same(found: Mapping[str, pd.DataFrame], expected: Mapping[str, pd.DataFrame]) -> None:
    for name, rows in expected.items():
        pd.testing.assert_frame_equal(found[name], rows, obj=name)
