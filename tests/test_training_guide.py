"""The task of docs/training.md, as a newcomer would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import forget, raypipe

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "training.md"


def test_the_task_is_short_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name, language in (("digits.py", "python"), ("digits.yaml", "yaml")):
        found = re.search(rf"`{name}`.*?```{language}\n(.*?)```", text, re.DOTALL)
        assert found is not None
        (tmp_path / name).write_text(found[1], encoding="utf-8")
    assert len((tmp_path / "digits.py").read_text().splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    training = [f"train.training.{key}=16" for key in ("effective_batch", "micro_batch")]
    raypipe("run", "digits.yaml", "--run-dir", "run", *training, "train.training.log_every=1")
    forget(tmp_path)
    run = RunDirectory.at(tmp_path / "run")
    steps = read_table(run, "steps")
    assert list(steps["step"]) == list(range(1, 201))
    assert steps["eval_accuracy"].dropna().iloc[-1] > 0.85
    trial = read_table(run, "trials").iloc[0]
    assert (trial["status"], trial["steps"], trial["workers"]) == ("succeeded", 200, 1)
    assert trial["loader_wait_share"] < 1
    samples = read_table(run, "gpu_samples")
    assert len(samples)
    assert samples["gpu_uuid"].isna().all()
