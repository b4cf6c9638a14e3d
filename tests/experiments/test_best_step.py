"""A part of the training data chooses the best step; what is reported has no say in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.command import table
from tests.experiments.conftest import SUMMARIZED
from tests.experiments.rows import write_rows
from tests.experiments.runs import run


@dataclass(frozen=True)
class Case:
    """A training that learns its samples by heart.

    Args:
        write: writes a file of some size.
        data: the overrides that train on a file and report another.
        settings: of the model and the data.
        training: of the section ``train.training``.
        steps: more than are good.
        metric: that chooses the step.
        result: what is reported of a run.

    """

    write: Callable[[Path, int], Path]
    data: Callable[[Path, Path], list[str]]
    settings: tuple[str, ...]
    training: tuple[str, ...]
    steps: int
    metric: str
    result: Callable[[Path], Any]


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


CASES = {
    "transformer": Case(
        numbers,
        lambda train, held_out: [f"data.file={train}", f"data.test_file={held_out}"],
        ("data.source=table", "data.target=y", "data.validation_share=0.2", "model.hidden=32",
         "model.layers=1", "model.dropout=0"),
        ("learning_rate=0.01", "weight_decay=0", "warmup_steps=0"), 150, "eval_mae",
        lambda folder: table(folder, "measures").set_index("method").loc["transformer", "rmse"],
    ),
    "summarization": Case(
        pairs,
        lambda train, held_out: [f"data.files=[{train}]", f"data.held_out_files=[{held_out}]"],
        ("data.source=files", "data.validation_share=0.3", "generation.beams=1", "model.width=32",
         "model.vocabulary=300", "model.head_width=16", "model.heads=2", "model.feed_forward=32",
         "model.layers=1", "model.dropout=0", "data.source_length=64"),
        ("warmup_steps=0",), 200, "eval_cross_entropy",
        lambda folder: list(table(folder, "summaries").sort_values("number")["summarizer"]),
    ),
    "lm_pretrain": Case(
        letters,
        lambda train, held_out: [f"data.files=[{train}]", f"data.held_out_files=[{held_out}]"],
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
    case = CASES[config]
    train, one, other = (case.write(tmp_path / str(rows), rows) for rows in (480, 200, 201))

    def trained(name: str, held_out: Path, *training: str, only: Sequence[str] = ()) -> pd.Series:
        given = [*case.settings, *case.data(train, held_out), "train.training.schedule=constant"]
        given += [f"train.training.{each}" for each in (*case.training, *training)]
        assert run(config, tmp_path / name, *given, only=only) == 0
        return table(tmp_path / name, "trials").iloc[0]

    best = trained("best", one, f"steps={case.steps}")
    steps = table(tmp_path / "best", "steps").set_index("step")[case.metric].dropna()
    assert len(steps) >= 10
    assert best["best_step"] == steps.idxmin() < steps.index[-1]
    assert best[case.metric] == steps.min()
    assert best["stopped_early"] == (best["steps"] < case.steps)
    last = trained("short", one, f"steps={best['best_step']}", "monitor=null")
    assert "best_step" not in last.dropna()
    assert case.result(tmp_path / "best") == case.result(tmp_path / "short")
    again = trained("other", other, f"steps={case.steps}", only=["train"])
    names = ["best_step", "steps", case.metric]
    assert [again[name] for name in names] == [best[name] for name in names]
