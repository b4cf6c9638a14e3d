"""Metrics files as scripts write them: late, in parts, restarted, in the formats of frameworks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.scripts import metrics
from raypipe.scripts.experiment import ScriptTask
from raypipe.scripts.history import ScriptHistory
from raypipe.scripts.metrics import MetricsFile, Reading, numbers
from raypipe.scripts.settings import ScriptStageSettings
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_rows
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import TrainingSettings

LIGHTNING = (
    "epoch,step,train_loss,val_loss\n0,4,0.27,\n0,9,0.37,\n0,15,,0.44\n1,19,0.54,\n1,31,,0.41\n"
)
TRAINER = {
    "global_step": 10,
    "log_history": [
        {"epoch": 0.6, "grad_norm": 1.0, "learning_rate": 4e-05, "loss": 2.42, "step": 5},
        {"epoch": 1.2, "grad_norm": 1.1, "learning_rate": 3e-05, "loss": 2.41, "step": 10},
        {"epoch": 1.2, "eval_loss": 2.4, "eval_runtime": 0.01, "step": 10},
        {"train_runtime": 0.2, "train_loss": 2.415, "train_samples_per_second": 692.8, "step": 10},
    ],
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file at every call."""
    monkeypatch.setattr(metrics, "_POLL_S", 0.0)
    monkeypatch.setattr(metrics, "_SHARE", 1e9)


def job(folder: Path) -> TrainingJob:
    settings = ScriptStageSettings(command="python train.py")
    task = ScriptTask(str(folder), {}, {}, frozenset(), frozenset())
    return TrainingJob("t", "run", task, settings, BatchPlan(4, 2, 8, 1), RunDirectory.at(folder))


def history(folder: Path, **columns: str) -> ScriptHistory:
    return ScriptHistory(job(folder), columns, 8)


def test_a_file_that_appears_late_and_grows_within_lines(tmp_path: Path) -> None:
    reader = MetricsFile(tmp_path, "m.jsonl")
    assert reader.read() == Reading([])
    with (tmp_path / "m.jsonl").open("w") as file:
        found = []
        for part in (
            '{"step": 1, ',
            '"loss": 2}\n{"st',
            'ep": 2, "loss": 1}\nprogress\n',
            '{"step":3}',
        ):
            file.write(part)
            file.flush()
            found.append(reader.read().records)
    assert found == [[], [{"step": 1, "loss": 2}], [{"step": 2, "loss": 1}], []]
    assert reader.read(last=True).records == [{"step": 3}]


@given(
    rows=st.lists(st.tuples(st.integers(0, 10**6), st.floats(allow_nan=False)), max_size=20),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    suffix=st.sampled_from(["jsonl", "csv"]),
)
def test_any_cuts_give_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, rows, cuts, suffix
) -> None:
    path = tmp_path_factory.mktemp("cuts") / f"m.{suffix}"
    if suffix == "csv":
        lines = ["step,loss", *(f"{step},{loss!r}" for step, loss in rows)]
    else:
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in rows]
    content = "".join(f"{line}\n" for line in lines).encode()
    reader, found = MetricsFile(path.parent, path.name), []
    for end in [*sorted(cuts), len(content)]:
        path.write_bytes(content[:end])  # another file of the same beginning
        batch = reader.read()
        assert not batch.restarted
        found += batch.records
    assert [numbers(record) for record in found] == [
        {"step": float(step), "loss": loss} for step, loss in rows
    ]


def test_a_file_that_begins_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path, reader = tmp_path / "m.jsonl", MetricsFile(tmp_path, "m.jsonl")
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert not reader.read().restarted
    path.write_text('{"step": 2}\n{"step": 3}\n{"step": 4}\n')  # longer, with another beginning
    assert reader.read() == Reading([{"step": 2}, {"step": 3}, {"step": 4}], restarted=True)
    path.write_text("")
    reader.read()
    path.write_text('{"step": 3}\n')
    assert reader.read().records == [{"step": 3}]


def test_the_log_of_lightning(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(LIGHTNING)
    rows = history(tmp_path)
    rows.add(MetricsFile(tmp_path, "metrics.csv").read(), 1.0)
    assert [(s, r.get("loss"), r.get("eval_loss")) for s, r in sorted(rows.rows.items())] == [
        (4, 0.27, None), (9, 0.37, None), (15, None, 0.44), (19, 0.54, None), (31, None, 0.41),
    ]  # fmt: skip
    assert (
        rows.last_values().items() >= {"steps": 31, "loss_final": 0.54, "eval_loss": 0.41}.items()
    )


def test_a_log_with_a_new_column_is_written_again(tmp_path: Path) -> None:
    path, rows = tmp_path / "metrics.csv", history(tmp_path)
    reader = MetricsFile(tmp_path, path.name)
    path.write_text("step,loss\n1,3\n2,2\n")
    rows.add(reader.read(), 1.0)
    path.write_text("step,loss\n1,3\n2,2\n4,1\n")
    rows.add(reader.read(), 2.0)
    speed = rows.rows[4]["samples_per_s"]
    assert speed == 2 * 8 / 1.0
    path.write_text("step,loss,val_loss\n1,3,\n2,2,\n4,1,\n6,,0.5\n")
    rows.add(reader.read(), 3.0)
    assert rows.rows[4]["samples_per_s"] == speed
    assert rows.rows[6]["eval_loss"] == 0.5
    assert rows.speed(99.0) == {"samples_per_s": 4 * 8 / 2.0, "step_time_s": 0.5}


def test_the_state_of_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-10" / "trainer_state.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TRAINER)[:50])
    reader, rows = MetricsFile(tmp_path, "**/trainer_state.json"), history(tmp_path)
    assert reader.read().records == []  # half a file
    path.write_text(json.dumps(TRAINER))
    rows.add(reader.read(), 1.0)
    assert (rows.rows[5]["loss"], rows.rows[5]["lr"]) == (2.42, 4e-05)
    assert rows.rows[10].items() >= {"loss": 2.41, "eval_loss": 2.4, "train_loss": 2.415}.items()
    assert rows.last_values()["loss_final"] == 2.41
    assert rows.speed(50.0)["samples_per_s"] == 692.8


def test_rows_from_the_first_new_step_on_are_replaced(tmp_path: Path) -> None:
    rows = history(tmp_path)
    rows.add(Reading([{"step": n, "loss": 1} for n in range(1, 7)]), 1.0)
    rows.store()
    again = history(tmp_path)
    again.restore()
    again.add(Reading([{"step": 4, "loss": 2}], restarted=True), 2.0)
    again.store()
    stored = read_rows(RunDirectory.at(tmp_path), "steps", "t")
    assert [(row["step"], row["loss"]) for row in stored] == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_epochs_count_without_steps_and_samples_give_the_speed_of_the_newest_file(
    tmp_path: Path,
) -> None:
    reader, rows = MetricsFile(tmp_path, "**/*.jsonl"), history(tmp_path, loss="train/nll")
    for epoch in (1, 2, 3):
        path = tmp_path / f"version_{epoch}" / "m.jsonl"
        path.parent.mkdir()
        record = {"epoch": epoch, "train/nll": "1.5", "samples": 500 * epoch}
        path.write_text(json.dumps(record) + "\n")
        os.utime(path, (10**9 + epoch, 10**9 + epoch))
        rows.add(reader.read(), 10.0 * epoch)
    expected = {"step": 2, "epoch": 2.0, "loss": 1.5, "samples_per_s": 50.0}
    assert rows.rows[2].items() >= expected.items()
    assert rows.speed(60)["samples_per_s"] == 50.0


def test_epochs_from_zero_are_steps_from_one(tmp_path: Path) -> None:
    rows, task, training = history(tmp_path), job(tmp_path).task, TrainingSettings(epochs=3)
    new = rows.add(Reading([{"epoch": n, "loss": 1.0, "val_loss": 2.0} for n in (0, 1)]), 1.0)
    found = [(row["step"], row["epoch"], task.done(row, training)) for row in new]
    assert found == [(1, 0.0, 1), (2, 1.0, 2)]
    rows.store()
    again = history(tmp_path)
    again.restore()
    again.add(Reading([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.4}], restarted=True), 9.0)
    assert [(step, row["loss"]) for step, row in again.rows.items()] == [(1, 1), (2, 0.5), (3, 0.4)]
    assert again.last_step == 3


def test_losses_that_are_not_finite_end_it_after_three_rows(tmp_path: Path) -> None:
    rows = history(tmp_path)
    rows.add(Reading([{"step": 1, "loss": math.nan}, {"step": 2, "loss": 1.0}]), 1.0)
    assert rows.rows[1]["loss"] is None
    rows.add(Reading([{"step": n, "loss": math.inf} for n in (3, 4)]), 2.0)
    with pytest.raises(FloatingPointError, match="loss of the script is inf at step 4"):
        rows.finish()
    with pytest.raises(FloatingPointError, match="at step 5"):
        rows.add(Reading([{"step": 5, "loss": math.nan}]), 3.0)


def test_a_new_file_without_losses_does_not_hide_one_that_is_not_finite(tmp_path: Path) -> None:
    rows = history(tmp_path)
    rows.add(Reading([{"step": 1, "loss": math.nan}]), 1.0)
    rows.add(Reading([{"step": 2, "val_loss": 0.5}], restarted=True), 2.0)
    with pytest.raises(FloatingPointError, match="at step 1"):
        rows.finish()


def test_one_loss_that_is_read_again_counts_once(tmp_path: Path) -> None:
    rows = history(tmp_path)
    for at in (1.0, 2.0, 3.0):
        rows.add(Reading([{"step": 1, "loss": math.inf}], restarted=at > 1.0), at)
    rows.add(Reading([{"step": 2, "loss": 0.5}]), 4.0)
    rows.finish()
