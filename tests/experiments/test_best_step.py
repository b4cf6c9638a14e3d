"""A part of the training data chooses the best step; what is reported has no say in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.command import table
from tests.experiments.conftest import SUMMARIZED
from tests.experiments.rows import write_rows
from tests.experiments.runs import run


def numbers(path: Path, rows: int) -> Path:
    draw = np.random.default_rng(rows)
    inputs = draw.standard_normal((rows // 4, 4))
    columns = {f"x_{place}": inputs[:, place] for place in range(4)}
    columns["y"] = inputs[:, 0] + 2 * draw.standard_normal(rows // 4)
    return write_rows(path.with_suffix(".parquet"), pd.DataFrame(columns))


def pairs(path: Path, rows: int) -> Path:
    draw = np.random.default_rng(rows)
    made = []
    for number in range(rows // 4):
        document = f"{' '.join(draw.choice(SUMMARIZED, 4))} {number}."
        summary = f"Get the {' '.join(draw.choice(SUMMARIZED, 2))}."  # there is no rule
        made.append({"document": document, "summary": summary})
    return write_rows(path.with_suffix(".jsonl"), made)


def letters(path: Path, rows: int) -> Path:
    path = path.with_suffix(".txt")
    path.write_text("".join(np.random.default_rng(rows).choice(list("aaaabbc \n"), 3 * rows)))
    return path


#: by configuration: what writes a file of some size, the keys of the files to train on and to
#: report, settings of the model and the data, those of the training, more steps than are good, the
#: metric that chooses the step, and what is reported of a run
CASES = {
    "transformer": (
        numbers, ("data.file={}", "data.test_file={}"),
        ("data.source=table", "data.target=y", "data.validation_share=0.2", "model.hidden=32",
         "model.layers=1", "model.dropout=0"),
        ("learning_rate=0.01", "weight_decay=0", "warmup_steps=0"), 150, "eval_mae",
        lambda folder: table(folder, "measures").set_index("method").loc["transformer", "rmse"],
    ),
    "summarization": (
        pairs, ("data.files=[{}]", "data.held_out_files=[{}]"),
        ("data.source=files", "data.validation_share=0.3", "generation.beams=1", "model.width=32",
         "model.vocabulary=300", "model.head_width=16", "model.heads=2", "model.feed_forward=32",
         "model.layers=1", "model.dropout=0", "data.source_length=64"),
        ("warmup_steps=0",), 200, "eval_cross_entropy",
        lambda folder: list(table(folder, "summaries").sort_values("number")["summarizer"]),
    ),
    "lm_pretrain": (
        letters, ("data.files=[{}]", "data.held_out_files=[{}]"),
        ("data.source=text", "data.tokens=bytes", "data.validation_share=0.2", "model.width=64",
         "data.most_passes=null", "model.heads=2", "model.feed_forward=128", "model.layers=2",
         "model.context=16", "sample.prompt=a", "sample.tokens=20"),
        ("log_every=400", "learning_rate=0.005", "weight_decay=0", "warmup_steps=5",
         "optimizer=adamw", "micro_batch=12", "effective_batch=12"), 400, "eval_loss",
        lambda folder: table(folder, "measures")
        .set_index("method")["bits_per_byte"].drop("xz").to_dict(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        "transformer",
        pytest.param("summarization", marks=pytest.mark.slow),
        pytest.param("lm_pretrain", marks=pytest.mark.slow),
    ],
)
def test_of_samples_learned_by_heart_the_best_step_is_reported(tmp_path, config):
    write, keys, settings, training, most, metric, result = CASES[config]
    train, one, other = (write(tmp_path / str(rows), rows) for rows in (480, 200, 201))

    def trained(name: str, held_out: Path, *more: str, only: Sequence[str] = ()) -> pd.Series:
        files = [key.format(file) for key, file in zip(keys, (train, held_out), strict=True)]
        given = [f"train.training.{each}" for each in ("schedule=constant", *training, *more)]
        assert run(config, tmp_path / name, *settings, *files, *given, only=only) == 0
        return table(tmp_path / name, "trials").iloc[0]

    best = trained("best", one, f"steps={most}")
    steps = table(tmp_path / "best", "steps").set_index("step")[metric].dropna()
    assert len(steps) >= 10
    assert best["best_step"] == steps.idxmin() < steps.index[-1]
    assert best[metric] == steps.min()
    assert best["stopped_early"] == (best["steps"] < most)
    last = trained("short", one, f"steps={best['best_step']}", "monitor=null")
    assert "best_step" not in last.dropna()
    assert result(tmp_path / "best") == result(tmp_path / "short")
    again = trained("other", other, f"steps={most}", only=["train"])
    names = ["best_step", "steps", metric]
    assert [again[name] for name in names] == [best[name] for name in names]
