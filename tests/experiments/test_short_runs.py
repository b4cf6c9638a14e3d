"""Short runs of the workloads: what they say and leave, and the data that choose the best step.

Tables: ``short_runs.yaml``, ``best_step.yaml``.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.command import table
from tests.experiments.conftest import SUMMARIZED
from tests.experiments.rows import write_rows
from tests.experiments.runs import CONFIGS, SMALL, run, small
from tests.scenario import named_cases, play


@pytest.mark.parametrize("case", named_cases(__file__, "short_runs"))
def test_a_short_run(case, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        name: shlex.join([f"{CONFIGS / name}.yaml", "--profile", "cpu", *small(name, files)])
        for name in SMALL
    }
    play(case["commands"], **names, files=str(files))


def samples(folder: Path, rows: int) -> Path:
    """Documents and summaries without a rule, and numbers of which one says a little about y."""
    draw = np.random.default_rng(rows)
    made = []
    for number in range(rows):
        words, inputs = draw.choice(SUMMARIZED, 6), draw.standard_normal(4)
        row = {f"x_{place}": value for place, value in enumerate(inputs)}
        row |= {"y": inputs[0] + 2 * draw.standard_normal()}
        row |= {"document": f"{' '.join(words[:4])} {number}.", "summary": f"Get {words[4]}."}
        made.append(row)
    return write_rows(folder / f"{rows}.jsonl", made)


@pytest.mark.parametrize("case", named_cases(__file__, "best_step"))
def test_the_best_step_depends_on_the_validation_part_alone(tmp_path, case):
    """Of samples learned by heart; one file is reported in the one run, the other in the other."""
    train, *others = (samples(tmp_path, rows) for rows in (120, 50, 51))
    found, metric = [], case["metric"]
    for other in others:
        files = [key.format(file) for key, file in zip(case["files"], (train, other), strict=True)]
        folder = tmp_path / other.stem
        assert run(case["name"], folder, *case["words"], *files, only=("train",)) == 0
        trial = table(folder, "trials").iloc[0]
        steps = table(folder, "steps").set_index("step")[metric].dropna()
        assert len(steps) >= 10
        assert trial["best_step"] == steps.idxmin() < steps.index[-1]
        assert trial[metric] == steps.min()
        found.append(trial[["best_step", "steps", metric]].tolist())
    assert found[0] == found[1]
