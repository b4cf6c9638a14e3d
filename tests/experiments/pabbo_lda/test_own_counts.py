"""The quickstart on a user's own bag-of-words files, through the command."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from experiments.pabbo_lda import settings
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests import command

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
OWN = ("data.source=bow", "data.dir=counts", "lda.datasets=[mine]")
#: shipped models, and a study of three evaluations
TINY = (
    *("train_small.weights=shipped", "train_large.weights=shipped", "lda.t_max=8"),
    *("lda.optimizers=[random]", "lda.start=[2,4]", "lda.runs=1", "lda.seeds=1"),
    *("lda.evaluations=3", "lda.max_iter=1", "evaluate_small.functions=2"),
    *("evaluate_large.functions=2", "evaluate_small.steps=2", "evaluate_large.steps=2"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    settings._warn.cache_clear()
    Path("counts").mkdir()
    draw = np.random.default_rng(0)
    for split, documents in (("train", 60), ("val", 40)):
        counts = sparse.csr_matrix(draw.poisson(0.3, (documents, 50)))
        sparse.save_npz(f"counts/X_mine_{split}_bow.npz", counts)
    return tmp_path


def raypipe(*words: str) -> command.Ended:
    return command.in_process(InlineLauncher(), *words, environment={})


def test_the_quickstart_runs_on_own_files(caplog):
    ended = raypipe("run", str(QUICKSTART), *OWN, *TINY, "--local", "--run-dir", "r")
    assert ended.status == 0, ended.output
    found = read_table(RunDirectory.at("r"), "evaluations")
    assert set(found["dataset"]) == {"mine"}
    assert found["value"].between(1, 200).all()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["data.options: max_documents, max_features: left out, since data.source = bow"]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), "{max_documents: 4000, max_features: 1000}"),
        (("data.source=builtin",), "{max_documents: 4000, max_features: 1000}"),
        (("data.options.min_df=2",), "{max_documents: 4000, max_features: 1000, min_df: 2}"),
        (("data.options={}",), "{}"),
        (("data.options={}", "data.options.min_df=2"), "{min_df: 2}"),
        (OWN, "{}"),
        ((*OWN, "data.options.split=train"), "{split: train}"),
        (("data.source=text", "data.options={max_features: 9}"), "{max_features: 9}"),
    ],
)
def test_options_belong_to_the_source_that_was_chosen(words, options):
    shown = raypipe("config", str(QUICKSTART), *words).output.partition("\ndata:\n")[2]
    lines = [line.partition("#")[0].strip() for line in shown.splitlines()]
    items = [line for line in lines[3 : lines.index("train_small:")] if line]
    found = options.strip("{}").split(", ") if options != "{}" else []
    assert lines[2] == ("options:" if found else "options: {}")
    assert items == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            OWN[:2],
            "lda.datasets = stdlib: counts: there is no X_stdlib_val_bow.npz; there are: mine",
        ),
        (
            (*OWN, "data.options.max_features=9"),
            "data.options of data.source=bow: there is no option",
        ),
        ((*OWN, "data.options.split=test"), "data.options.split = 'test': input should be 'train'"),
    ],
)
def test_a_mistake_names_the_key_to_change(words, message):
    ended = raypipe("run", str(QUICKSTART), *words, *TINY, "--local", "--run-dir", "r")
    assert ended.status == 2, ended.output
    assert message in ended.output
    assert not Path("r").exists()
