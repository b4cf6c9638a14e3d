"""A script as a stage, through the commands, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.command import Ended, table
from tests.scenario import Step, cases, named_cases, play


def log(folder: Path) -> str:
    return (folder / "run/logs/train.log").read_text()


def trial(folder: Path) -> pd.Series[Any]:
    (_, row), *rest = table(folder / "run", "trials").iterrows()
    assert rest == []
    return row


def test_a_killed_script_resumes_and_its_metrics_become_the_same_rows(raypipe, folder):
    ended = raypipe("run")
    assert ended.status == 0, ended.output
    steps = table(folder / "run", "steps").sort_values("step")
    assert list(steps.step) == list(range(1, 13))
    written = (folder / "run/artifacts/train/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in written[:-1]]
    assert list(steps.loss) == losses
    assert trial(folder).loss_final == losses[-1]
    assert float((folder / "run/artifacts/train/model.txt").read_text()) > 1
    samples = table(folder / "run", "gpu_samples")
    assert (samples.rss_bytes >= 0).all()
    assert trial(folder).samples_per_s > 0
    (folder / "run").rename(folder / "whole")
    ended = raypipe("run", extra="--fail kill")
    assert ended.status == 0, ended.output
    (failure,) = table(folder / "run", "failures").to_dict("records")
    assert failure["kind"] == "worker_died"
    assert "SIGKILL" in failure["message"]
    steps = table(folder / "run", "steps").sort_values("step")
    assert list(steps.step) == list(range(1, 13))
    assert steps.loss.tolist() == losses
    attempts = [line for line in log(folder).splitlines() if line.startswith("---")]
    assert ["--resume" in line for line in attempts] == [False, True]
    assert trial(folder).attempts == 2


@pytest.mark.parametrize("case", named_cases(__file__, "commands"))
def test_commands_on_scripts(raypipe, folder, case):
    def run(step: Step) -> Ended:
        return raypipe(step.get("verb", "run"), **step.get("given", {}))

    play(case["commands"], run, "run")


@pytest.mark.parametrize("case", cases(__file__, "mistakes"), ids=lambda case: case["message"])
def test_a_mistake_is_one_message(raypipe, folder, case):
    ended = raypipe("run", **case["given"])
    assert ended.status == 2, ended.output
    assert case["message"] in ended.output
    assert "Traceback" not in ended.output
    assert not (folder / "run").exists()
