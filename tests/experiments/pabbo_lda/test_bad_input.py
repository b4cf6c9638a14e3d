"""Mistakes in the main job's configuration and data: exit 2, one message, nothing left."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from raypipe import cli

CONFIG = "experiment: experiments.pabbo_lda\n"
BOW = ("data.source=bow", "data.dir=bow", "lda.datasets=[mine]")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "bow").mkdir()
    counts = np.random.default_rng(0).integers(0, 3, (30, 1200))
    sparse.save_npz(tmp_path / "bow/X_mine_val_bow.npz", sparse.csr_matrix(counts))
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3]), *sys.path])
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must end with status 2, leaving no run directory."""
    sys.argv = ["raypipe", "run", "c.yaml", *arguments]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert not Path("runs").exists()
    return message


def test_the_data_is_good_as_it_is(work, capsys):
    sys.argv = ["raypipe", "plan", "c.yaml", *BOW]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert "100 studies" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lda.rnus=2",), "did you mean lda.runs?"),
        (("lda.optimizers=[gaa]",), "lda.optimizers"),
        (("lda.optimizers=[ga,ga]",), "given twice"),
        (("lda.t_min=1",), "lda.t_min"),
        (("lda.t_max=1500",), "only 1200 words"),
        (("lda.t_max=500",), r"outside [t_min, t_max] = [2, 500]"),
        (("lda.alpha=[0.1,0.1]",), "lda.alpha = [0.1, 0.1]: must be 1e-3 <= low < high <= 1"),
        (("lda.eta=[0.0005,1]",), "lda.eta = [0.0005, 1.0]"),
        (("lda.eta=[0.1,2]",), "<= 1"),
        (("lda.eta=0.1",), "lda.eta = 0.1"),
        (
            ("lda.eta=[0.1,1]",),
            "lda.optimizers = ['pabbo_small', 'pabbo_large', 'golden_section', 'bisect']",
        ),
        (("lda.seed=4294967296",), "lda: seed = 4294967296 with runs = 10: seeds end at"),
        (("lda.seed=4294967287",), "seed + runs must be at most 4294967296"),
        (("lda.cpus=1.5",), "whole number"),
        (("lda.cpus=0",), "lda.cpus"),
        (("lda.evaluations=0",), "lda.evaluations"),
        (("train_small.pabbo.model.heads=3",), "heads=3 must divide d_model=32"),
        (("train_small.training.epochs=1",), "PABBO has no epochs"),
        (("evaluate_small.query_points=20",), "query_points=20 form fewer pairs"),
        (("evaluate_small.steps=2000",), "steps=2000 exceeds candidate_pairs=1024"),
        (("lda.datasets=[his]",), "his"),
        (("data.dir=nowhere",), "nowhere"),
        (("data.source=arrow",), "data.source"),
        (("data.options={splt: val}",), "split"),
    ],
)
def test_settings_that_cannot_work(work, capsys, arguments, message):
    assert message in refused(capsys, *BOW, *arguments)


def test_a_missing_file_names_those_there_are(work, capsys):
    assert "mine" in refused(capsys, *BOW[:2], "lda.datasets=[mime]")
