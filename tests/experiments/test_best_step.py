"""A part of the training data chooses the best step; what is reported has no say in it."""

from __future__ import annotations

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
#: report, settings of the model and the data, those of the training, more steps than are good, and
#: the metric that chooses the step
CASES = {
    "transformer": (
        numbers, ("data.file={}", "data.test_file={}"),
        ("data.source=table", "data.target=y", "data.validation_share=0.2", "model.hidden=32",
         "model.layers=1", "model.dropout=0"),
        ("learning_rate=0.01", "weight_decay=0", "warmup_steps=0"), 150, "eval_mae",
    ),
    "summarization": (
        pairs, ("data.files=[{}]", "data.held_out_files=[{}]"),
        ("data.source=files", "data.validation_share=0.3", "model.width=32",
         "model.vocabulary=300", "model.head_width=16", "model.heads=2", "model.feed_forward=32",
         "model.layers=1", "model.dropout=0", "data.source_length=64"),
        ("warmup_steps=0",), 200, "eval_cross_entropy",
    ),
    "lm_pretrain": (
        letters, ("data.files=[{}]", "data.held_out_files=[{}]"),
        ("data.source=text", "data.tokens=bytes", "data.validation_share=0.2", "model.width=64",
         "data.most_passes=null", "model.heads=2", "model.feed_forward=128", "model.layers=2",
         "model.context=16"),
        ("log_every=400", "learning_rate=0.005", "weight_decay=0", "warmup_steps=5",
         "optimizer=adamw", "micro_batch=12", "effective_batch=12"), 400, "eval_loss",
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
def test_the_best_step_depends_on_the_validation_part_alone(tmp_path, config):
    """Of samples learned by heart; one file is reported in the one run, the other in the other."""
    write, keys, settings, training, most, metric = CASES[config]
    train, *others = (write(tmp_path / str(rows), rows) for rows in (480, 200, 201))
    found = []
    for other in others:
        files = [key.format(file) for key, file in zip(keys, (train, other), strict=True)]
        given = [f"train.training.{each}" for each in (*training, f"steps={most}")]
        given += [*settings, *files, "train.training.schedule=constant"]
        folder = tmp_path / other.stem
        assert run(config, folder, *given, only=("train",)) == 0
        trial = table(folder, "trials").iloc[0]
        steps = table(folder, "steps").set_index("step")[metric].dropna()
        assert len(steps) >= 10
        assert trial["best_step"] == steps.idxmin() < steps.index[-1]
        assert trial[metric] == steps.min()
        found.append(trial[["best_step", "steps", metric]].tolist())
    assert found[0] == found[1]
