"""Two run directories and one store: what is taken, what is computed again, what is never taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from example_tasks import Regression

from raypipe.hardware import Hardware
from raypipe.integrations.tracking import Target, Trackers
from raypipe.launch.inline import InlineLauncher
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.progress import Display
from raypipe.pipeline.session import Session
from raypipe.pipeline.stages import train_stage
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.store import Store
from raypipe.storage.tables import read_table
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from tests.raypipe.composed import composed, run_stages

ARTIFACT = "words.txt"


@pytest.fixture
def calls() -> list[str]:
    return []


def open_session(folder: Path, store: Path | None, code: str = "1", name: str = "r") -> Session:
    run = RunDirectory.at(folder)
    node = Hardware("here", 2, 2**30)
    none = Trackers((), Target(run, name, "example", {}))
    session = Session(run, name, Ledger(run), InlineLauncher(), Display(), [node], none, code=code)
    return replace(session, store=Store(str(store)) if store else None)


def stages(calls: list[str], *, seed: int = 0, steps: int = 4) -> list[Stage]:
    """Prepare, train, evaluate each of two units, and a summary."""

    def prepare(context: StageContext) -> None:
        calls.append("prepare")
        path = context.run_dir.artifact("prepare", "deep", ARTIFACT)
        context.run_dir.write(path, b"some words")

    def task(settings: object, run_dir: RunDirectory | None) -> Regression:
        calls.append("train")
        return Regression()

    def evaluate(context: StageContext) -> None:
        content = context.run_dir.read(context.run_dir.artifact("prepare", "deep", ARTIFACT))
        for unit in context.todo():
            calls.append(unit.key)
            row = {"trial_id": context.run_dir.trial_id("train"), "value": len(content) + 0.5}
            context.ledger.put("scores", {unit.key: row})
            context.finish(unit)

    def summary(context: StageContext) -> None:
        calls.append("summary")
        total = sum(row["value"] for row in context.ledger.rows("scores"))
        context.ledger.put("totals", {"total": {"total": total}})

    training = TrainingSettings(
        micro_batch=8, accumulation=1, effective_batch=8, steps=steps, log_every=1, seed=seed
    )
    return [
        Stage("prepare", prepare),
        train_stage(
            "train",
            TrainStageSettings(training=training),
            task,
            needs=("prepare",),
            literals={"seed": seed, "steps": steps},
        ),
        Stage("evaluate", evaluate, [Unit("evaluate/a"), Unit("evaluate/b")], ("train",)),
        Stage("summary", summary, needs=("evaluate",), always_rerun=True),
    ]


def tables(session: Session) -> dict[str, list[dict[str, object]]]:
    """The rows of results without what names the run and the command."""
    found = {}
    for name in ("trials", "steps", "scores", "totals"):
        frame = read_table(session.run_dir, name)
        frame = frame.drop(columns=["run_id", "command_id"], errors="ignore")
        found[name] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return found


def test_second_run_directory_computes_nothing_but_its_summary(tmp_path: Path, calls: list[str]):
    first = open_session(tmp_path / "a", tmp_path / "store")
    assert run_stages(stages(calls), first) is None
    assert calls == ["prepare", "train", "evaluate/a", "evaluate/b", "summary"]
    calls.clear()
    second = open_session(tmp_path / "b", tmp_path / "store", name="other")
    assert run_stages(stages(calls), second) is None
    assert calls == ["summary"]
    assert tables(second) == tables(first)
    assert set(read_table(second.run_dir, "steps")["run_id"]) == {"other"}
    model = "train"
    assert second.run_dir.read(second.run_dir.model(model)) == first.run_dir.read(
        first.run_dir.model(model)
    )
    reused = read_table(second.run_dir, "reused")
    assert list(reused["stage"]) == ["prepare", "train", "evaluate"]
    assert set(reused["source_run_id"]) == {"r"}
    assert reused["computed_at"].notna().all()
    calls.clear()
    assert run_stages(stages(calls), open_session(tmp_path / "b", tmp_path / "store")) is None
    assert calls == []


def test_other_settings_and_other_code_are_not_taken(tmp_path: Path, calls: list[str]):
    assert run_stages(stages(calls), open_session(tmp_path / "a", tmp_path / "store")) is None
    calls.clear()
    other = open_session(tmp_path / "b", tmp_path / "store")
    assert run_stages(stages(calls, seed=1), other) is None
    assert calls == ["train", "evaluate/a", "evaluate/b", "summary"]
    calls.clear()
    edited = open_session(tmp_path / "c", tmp_path / "store", code="2")
    assert run_stages(stages(calls), edited) is None
    assert calls == ["prepare", "train", "evaluate/a", "evaluate/b", "summary"]


@pytest.mark.parametrize("folder", ["blobs", "entries"])
def test_a_flipped_byte_costs_a_computation_and_a_warning(
    tmp_path: Path, calls: list[str], folder: str, caplog: pytest.LogCaptureFixture
):
    first = open_session(tmp_path / "a", tmp_path / "store")
    assert run_stages(stages(calls), first) is None
    for path in (tmp_path / "store" / folder).rglob("*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    calls.clear()
    second = open_session(tmp_path / "b", tmp_path / "store")
    assert run_stages(stages(calls), second) is None
    assert calls == ["prepare", "train", "evaluate/a", "evaluate/b", "summary"]
    assert "damaged in the store" in caplog.text
    assert {n: len(r) for n, r in tables(second).items()} == {
        n: len(r) for n, r in tables(first).items()
    }
    calls.clear()
    third = open_session(tmp_path / "c", tmp_path / "store")  # the second one stored them again
    assert run_stages(stages(calls), third) is None
    assert calls == ["summary"]


def test_a_variant_takes_what_a_run_without_a_matrix_computed(tmp_path: Path, calls: list[str]):
    first = open_session(tmp_path / "a", tmp_path / "store")
    assert run_stages(stages(calls), first) is None
    calls.clear()
    names = ("train", "evaluate", "summary")
    varied = [
        replace(stage, variant="x=1", variants={n: "x=1" for n in names if n in stage.needs})
        if stage.name != "prepare"
        else stage
        for stage in composed(stages(calls))
    ]
    from raypipe.pipeline.runner import run_stages as run_composed

    second = open_session(tmp_path / "b", tmp_path / "store", name="other")
    assert run_composed(varied, second) is None
    assert calls == ["summary"]
    assert list(read_table(second.run_dir, "trials")["trial_id"]) == ["train@x=1"]
    steps = read_table(second.run_dir, "steps")
    assert set(steps["trial_id"]) == {"train@x=1"}
    assert set(steps["variant"]) == {"x=1"}
    assert set(read_table(second.run_dir, "scores")["trial_id"]) == {"train@x=1"}
    assert second.run_dir.exists(second.run_dir.path("models", "train@x=1.safetensors"))


def test_rows_of_an_interrupted_stage_are_not_stored(tmp_path: Path, calls: list[str]):
    def half(context: StageContext) -> None:
        first, second = context.stage.units
        if context.todo()[0] == first:
            context.ledger.put("scores", {first.key: {"value": 1.0}})
            context.finish(first)
            raise RuntimeError("stopped")
        context.ledger.put("scores", {second.key: {"value": 2.0}})
        context.finish(second)

    halves = [Stage("evaluate", half, [Unit("evaluate/a"), Unit("evaluate/b")])]
    session = open_session(tmp_path / "a", tmp_path / "store")
    assert run_stages(halves, session) is not None
    assert run_stages(halves, session) is None
    assert not list(Store(str(tmp_path / "store")).entries())


def test_two_drivers_at_once_lose_nothing(tmp_path: Path):
    sessions = [open_session(tmp_path / name, tmp_path / "store") for name in "abcd"]
    failed: list[str | None] = []
    threads = [
        Thread(target=lambda s=s: failed.append(run_stages(stages([])[:1], s))) for s in sessions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [None] * 4
    store = Store(str(tmp_path / "store"))
    assert len(list(store.entries())) == 1
    assert not list(store.damages())
    for session in sessions:
        run_dir = session.run_dir
        assert run_dir.read(run_dir.artifact("prepare", "deep", ARTIFACT)) == b"some words"


def test_a_store_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, calls: list[str], caplog: pytest.LogCaptureFixture
):
    session = open_session(tmp_path / "a", tmp_path / "store")
    (tmp_path / "store").write_text("a file where the folder should be")
    assert run_stages(stages(calls), session) is None
    assert caplog.text.count("not used from here on") == 1
