"""Metrics files as scripts write them: late, in parts, written again."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.scripts import metrics
from raypipe.scripts.command import ScriptStageSettings
from raypipe.scripts.experiment import ScriptTask
from raypipe.scripts.metrics import MetricsFile, Reading, ScriptHistory, numbers
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import TrainingSettings
from tests.scenario import named_cases

TASK = ScriptTask("", {}, {}, frozenset(), frozenset())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file at every call."""
    monkeypatch.setattr(metrics, "_SHARE", 1e9)


def history(folder: Path, **columns: str) -> ScriptHistory:
    settings = ScriptStageSettings(command="python train.py")
    plan, run = BatchPlan(4, 2, 8, 1), RunDirectory.at(folder)
    return ScriptHistory(TrainingJob("t", "run", TASK, settings, plan, run), columns, 8)


def ended_by(problem: str | None) -> AbstractContextManager[object]:
    return pytest.raises(FloatingPointError, match=problem) if problem else nullcontext()


@given(
    rows=st.lists(st.tuples(st.integers(0, 10**6), st.floats(allow_nan=False)), max_size=20),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    suffix=st.sampled_from(["jsonl", "csv"]),
)
def test_any_cuts_give_the_records_of_whole_lines(tmp_path_factory, rows, cuts, suffix):
    path = tmp_path_factory.mktemp("cuts") / f"m.{suffix}"
    if suffix == "csv":
        lines = ["step,loss", *(f"{step},{loss!r}" for step, loss in rows)]
    else:
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in rows]
    content = "".join(f"{line}\n" for line in lines).encode()
    expected = [{"step": float(step), "loss": loss} for step, loss in rows]
    reader, read = MetricsFile(path), list[dict[str, float]]()
    assert reader.read() is None
    for end in [*sorted(cuts), len(content)]:
        path.write_bytes(content[:end])  # another file of the same beginning
        if (reading := reader.read()) is not None:
            assert not reading.restarted
            read += map(numbers, reading.records)
            known = max(0, content[:end].count(b"\n") - (suffix == "csv"))
            assert read == expected[:known]
    assert read == expected


@pytest.mark.parametrize("case", named_cases(__file__, "logs"))
def test_a_log_at_each_look(tmp_path, case):
    """Each ``look`` writes a file and reads it ten seconds later; an ``attempt`` begins anew."""
    rows = history(tmp_path, **case.get("columns", {}))
    path = tmp_path / case["file"]
    reader = MetricsFile(path)
    for number, look in enumerate(case["looks"], start=1):
        if look.get("attempt"):
            rows.store()
            rows, reader = history(tmp_path), MetricsFile(path)
            rows.restore()
        path.write_text(look["write"])
        reading = reader.read()
        with ended_by(look.get("ends")):
            rows.add(reading or Reading([]), 10.0 * number)
        for step, expected in look.get("rows", {}).items():
            assert {name: rows.rows[step].get(name) for name in expected} == expected
        assert list(rows.rows) == look.get("steps", list(rows.rows))
    with ended_by(case.get("finish")):
        rows.check_losses()
    assert rows.last_values().items() >= case.get("last", {}).items()
    assert rows.speed(50.0).items() >= case.get("speed", {}).items()
    for unit, done in case.get("done", {}).items():
        length = TrainingSettings(**{unit: 3})
        assert [TASK.done(row, length) for row in rows.rows.values()] == done
