"""Short runs of the workloads, what they say and what they leave (table: ``short_runs.yaml``)."""

from __future__ import annotations

import shlex

import pytest

from tests.experiments.runs import CONFIGS, SMALL
from tests.scenario import named_cases, play


@pytest.mark.parametrize("case", named_cases(__file__, "short_runs"))
def test_a_short_run(case, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        name: shlex.join([f"{CONFIGS / name}.yaml", "--profile", "cpu", *words])
        for name, words in SMALL.items()
    }
    play(case["commands"], **names, files=str(files))
