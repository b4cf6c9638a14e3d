"""The validation part of the transformer: it chooses the best step, and nothing else sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import raypipe as rp
from raypipe.commands import cluster
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table

CONFIG = Path(__file__).resolve().parents[3] / "configs/transformer.yaml"
SMALL = ["model.hidden=32", "model.layers=1", "model.dropout=0", "train.training.warmup_steps=0"]


@pytest.fixture(autouse=True)
def _inline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def noise(path: Path, rows: int, seed: int) -> Path:
    """Write numbers that follow a rule a little, and are learned by heart otherwise."""
    draw = np.random.default_rng(seed)
    inputs = draw.standard_normal((rows, 4))
    target = inputs[:, 0] + 2 * draw.standard_normal(rows)
    np.savez(path, x=inputs, y=target)
    return path


def run(folder: Path, *given: str) -> pd.Series:
    rp.run(CONFIG, [*SMALL, *given], run_dir=folder, profile="cpu")
    return read_table(RunDirectory.at(folder), "trials").iloc[0]


def measured(folder: Path) -> pd.DataFrame:
    return read_table(RunDirectory.at(folder), "measures").set_index("method")


def test_of_rows_learned_by_heart_the_best_step_is_reported(tmp_path: Path) -> None:
    """A part of the training rows chooses the step; the reported rows have no say in it."""
    sizes = {"train": 120, "one": 200, "other": 200}
    files = {
        name: noise(tmp_path / f"{name}.npz", rows, seed)
        for seed, (name, rows) in enumerate(sizes.items())
    }

    def trained(name: str, test: str, *overrides: str) -> pd.Series:
        data = [f"data.file={files['train']}", f"data.test_file={files[test]}"]
        data += ["data.source=table", "data.target=y", "data.validation_share=0.2"]
        training = ["schedule=constant", "learning_rate=0.01", "weight_decay=0", *overrides]
        return run(tmp_path / name, *data, *(f"train.training.{each}" for each in training))

    best = trained("best", "one", "steps=300")
    steps = read_table(RunDirectory.at(tmp_path / "best"), "steps").set_index("step")["eval_mae"]
    assert len(steps.dropna()) >= 10
    assert best["best_step"] == steps.idxmin() < steps.dropna().index[-1]
    assert best["eval_mae"] == steps.min()
    assert best["stopped_early"] == (best["steps"] < 300)
    assert "best_step" not in trained("last", "one", "steps=300", "monitor=null").dropna()
    trained("short", "one", f"steps={best['best_step']}", "monitor=null")
    value, alone, ends = (
        measured(tmp_path / name).loc["transformer", "rmse"] for name in ("best", "short", "last")
    )
    assert value == alone < ends
    again = trained("other", "other", "steps=300")
    names = ["best_step", "steps", "eval_mae"]
    assert [again[name] for name in names] == [best[name] for name in names]
    assert measured(tmp_path / "other").loc["transformer", "rmse"] != value
