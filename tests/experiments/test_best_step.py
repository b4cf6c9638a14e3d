"""A part of the training data chooses the best step; what is reported has no say in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.command import table
from tests.experiments.conftest import SUMMARIZED
from tests.experiments.rows import write_rows
from tests.experiments.runs import run
from tests.experiments.summarization.test_runs import SMALL


def samples(folder: Path, rows: int) -> Path:
    """Documents and summaries without a rule, and numbers of which one says a little about y."""
    draw = np.random.default_rng(rows)
    made = []
    for number in range(rows // 4):
        words, inputs = draw.choice(SUMMARIZED, 6), draw.standard_normal(4)
        row = {f"x_{place}": value for place, value in enumerate(inputs)}
        row |= {"y": inputs[0] + 2 * draw.standard_normal()}
        row |= {"document": f"{' '.join(words[:4])} {number}.", "summary": f"Get {words[4]}."}
        made.append(row)
    return write_rows(folder / f"{rows}.jsonl", made)


#: by configuration: the keys of the files to train on and to report, settings of the model and the
#: data, those of the training, more steps than are good, and the metric that chooses the step
CASES = {
    "transformer": (
        ("data.file={}", "data.test_file={}"),
        ("data.source=table", "data.target=y", "data.ignore=[document,summary]",
         "data.validation_share=0.2", "model.hidden=32", "model.layers=1", "model.dropout=0"),
        ("learning_rate=0.01", "weight_decay=0", "warmup_steps=0"), 150, "eval_mae",
    ),
    "summarization": (
        ("data.files=[{}]", "data.held_out_files=[{}]"),
        (*SMALL, "data.validation_share=0.3"),
        ("warmup_steps=0",), 200, "eval_cross_entropy",
    ),
    "lm_pretrain": (
        ("data.files=[{}]", "data.held_out_files=[{}]"),
        ("data.source=text", "data.column=document", "data.tokens=bytes",
         "data.validation_share=0.2", "data.most_passes=null", "model.width=64", "model.heads=2",
         "model.feed_forward=128", "model.layers=2", "model.context=16"),
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
    keys, settings, training, most, metric = CASES[config]
    train, *others = (samples(tmp_path, rows) for rows in (480, 200, 204))
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
