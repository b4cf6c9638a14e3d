"""The validation part of the transformer: it chooses the best step, and nothing else sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import raypipe as rp
from experiments.common.corpora.corpus import CorpusError
from experiments.transformer.data import load
from experiments.transformer.settings import TransformerDataSettings
from experiments.transformer.training import StoredSamples
from raypipe.commands import cluster
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.experiments.transformer.samples import lines

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


def test_a_validation_file_chooses_the_step_and_the_baselines_train_on_it(tmp_path: Path) -> None:
    train, other, test = (
        lines(tmp_path / f"{name}.jsonl", [{"text": f"{word} {i}", "label": word} for i in range(n)
                                           for word in ("red", "blue", *extra)])
        for name, n, extra in (("train", 60, []), ("val", 15, ["green"]), ("test", 20, ["green"]))
    )  # fmt: skip
    given = ["data.source=sequences", f"data.file={train}", f"data.test_file={test}"]
    trial = run(tmp_path / "run", *given, f"data.validation_file={other}", "data.vocabulary=300",
                "train.training.epochs=2")  # fmt: skip
    assert trial["best_step"] > 0
    stored = RunDirectory.at(tmp_path / "run")
    sizes = [len(StoredSamples(stored, part)) for part in ("train", "validation", "held_out")]
    assert sizes == [120, 45, 60]
    accuracy = measured(tmp_path / "run")["accuracy"]
    assert accuracy["tfidf, linear svm"] == 1.0  # it has seen the third class
    assert accuracy["transformer"] < 0.7
    path = lines(tmp_path / "bad.jsonl", [{"text": "red", "label": 1}] * 3)
    settings = {"source": "sequences", "file": train, "validation_file": path}
    with pytest.raises(CorpusError, match=r"bad.jsonl: differs from data.file: .* string vs int64"):
        load(TransformerDataSettings.model_validate(settings), None)


@pytest.mark.parametrize(
    ("rows", "share", "note"),
    [
        (300, "0.05", "data.validation_share = 0.05 of 300 training rows is "),
        (600, "0", "data.validation_share = 0 of 600 training rows is 0"),
    ],
)
def test_without_a_validation_part_the_last_step_is_measured_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int, share: str, note: str
) -> None:
    train, test = (noise(tmp_path / f"{n}.npz", rows, seed) for seed, n in enumerate("ab"))
    trial = run(tmp_path / "run", "data.source=table", "data.target=y", f"data.file={train}",
                f"data.test_file={test}", f"data.validation_share={share}",
                "train.training.steps=12")  # fmt: skip
    assert trial["steps"] == 12
    assert "best_step" not in trial.dropna()
    assert not [name for name in trial.dropna().index if name.startswith("eval_")]
    said = capsys.readouterr().out
    assert f"no validation part: {note}" in said
    assert "the model of the last step is measured" in said


def test_the_parts_are_disjoint_and_the_test_part_stays_the_same(tmp_path: Path) -> None:
    rows = [{"text": f"text {i % 400}", "label": i % 2} for i in range(800)]
    path = lines(tmp_path / "a.jsonl", rows)
    found = []
    for share in (0.0, 0.2):
        given = {"source": "sequences", "file": path, "validation_share": share}
        data = load(TransformerDataSettings.model_validate(given), None)
        assert data is not None
        parts = {
            part: data.split(part).inputs["text"].to_pylist()
            for part in ("train", "validation", "held_out")
        }
        found.append((data.train.inputs["text"].to_pylist(), parts["held_out"]))
        assert sum(len(texts) for texts in parts.values()) == 800
        assert sum(len(set(texts)) for texts in parts.values()) == 400  # equal ones together
        assert (len(parts["validation"]) > 60) == (share > 0)
    assert found[0] == found[1]  # also what the baselines train on
