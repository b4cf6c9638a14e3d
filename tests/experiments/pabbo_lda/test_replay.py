"""Studies of LDA computed again through the public command, with a copy of the experiment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
CONFIG = """
experiment: experiments.pabbo_lda
data: {options: {max_documents: 100, max_features: 60, min_df: 2}}
lda:
  {runs: 2, t_max: 30, start: [5, 20], evaluations: 4, max_iter: 2, batch_size: 64,
   optimizers: [random, golden_section]}
"""


def raypipe(folder: Path, *words: str, expected: int = 0) -> str:
    """The output of a command in a folder, whose package ``experiments`` comes first."""
    done = subprocess.run(
        [sys.executable, "-m", "raypipe", *words],
        cwd=folder,
        env={**os.environ, "RAYPIPE_CACHE": str(folder / "cache"), "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "experiments", tmp_path / "experiments", ignore=ignored)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def test_studies_are_equal_until_an_edit_that_is_named(folder):
    raypipe(folder, "run", "c.yaml", "--run-dir", "r", "--only", "lda", "--local")
    shown = raypipe(folder, "replay", "r", "lda/stdlib/golden_section")
    for run in (0, 1):
        study = f"lda/stdlib/golden_section/{run}: "
        assert f"{study}equal\n" in shown or f"{study}within the tolerance: " in shown
    assert "\nevaluations, rows of several units of lda: " in shown  # not taken from a cache
    assert "evaluations.duration_s" in shown
    file = folder / "experiments/pabbo_lda/study/evaluations.py"
    file.write_text(file.read_text().replace("else float(np.mean(values))", "else 2 * values[0]"))
    shown = raypipe(folder, "replay", "r", "lda/stdlib/random/0", expected=1)
    (line,) = [line for line in shown.splitlines() if line.startswith("lda/stdlib/random/0")]
    assert ": differs: " in line
    assert "studies.best_perplexity by up to 0.5 (" in line
    assert "study_history.value by up to 0.5 in 4 rows (" in line
    # the mean was edited, not the fits: compiled kernels and those that numba has loaded from its
    # cache may order sums differently, which is seen in the last digit
    for difference in re.findall(r"evaluations\.value by up to ([^ ]+)", line):
        assert float(difference) < 1e-13
    edited = "experiments/pabbo_lda/study/evaluations.py: mean_value"
    assert f"changed since: code: {edited}\n" in shown
    shown = raypipe(folder, "show", "r", "--code")
    assert "--- experiments/pabbo_lda/study/evaluations.py\n" in shown
