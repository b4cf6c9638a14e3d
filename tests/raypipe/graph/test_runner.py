from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import SAMPLES, Points, Regression
from torch import Tensor, nn
from torch.utils.data import default_collate

from raypipe.errors import ConfigError, UnitError
from raypipe.graph import runner
from raypipe.graph.context import StageContext
from raypipe.graph.continuation import is_done
from raypipe.graph.experiment import Stage, Unit, in_order, with_needs
from raypipe.graph.progress import Display
from raypipe.graph.session import Session
from raypipe.graph.stages import train_stage
from raypipe.graph.tables import CORE
from raypipe.hardware import Hardware
from raypipe.integrations.tracking import Trackers
from raypipe.launch.inline import InlineLauncher
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from raypipe.training.task import Loss, StepContext
from tests.raypipe.composed import composed, resume, run_stages

Do = Callable[[StageContext], None]


def finish_all(context: StageContext) -> None:
    for unit in context.todo():
        context.ledger.put("evaluations", {unit.key: {"dataset": unit.key, "value": 1.0}})
        context.finish(unit)


def stage(name: str, *needs: str, do: Do = finish_all, derived: bool = False, **identity) -> Stage:
    return Stage(name, do, [Unit(name, {"of": name, **identity})], needs, always_rerun=derived)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return open_session(tmp_path / "run")


def open_session(folder: Path) -> Session:
    run = RunDirectory.at(folder)
    node = Hardware("here", 2, 2**30)
    none = Trackers((), run, "r", "example", {})
    return Session(run, "r", Ledger(run), InlineLauncher(), Display(), [node], none)


def statuses(session: Session) -> dict[str, str]:
    table = read_table(session.run_dir, "stages")
    return dict(zip(table["stage"], table["status"], strict=True))


def test_stages_run_after_what_they_need():
    order = [s.name for s in in_order([stage("c", "a", "b"), stage("b", "a"), stage("a")])]
    assert order == ["a", "b", "c"]
    chosen = with_needs([stage("a"), stage("b", "a"), stage("c")], ["b"])
    assert [s.name for s in chosen] == ["a", "b"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage("a", "b"), stage("b", "a")], "need each other: a -> b -> a"),
        ([stage("a", "x")], "'x', which does not exist"),
        ([stage("a"), stage("a")], "same name"),
    ],
)
def test_impossible_orders_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        in_order(stages)


def test_a_second_run_runs_nothing_and_a_new_unit_only_itself(tmp_path):
    ran: list[str] = []

    def do(context: StageContext) -> None:
        ran.extend(unit.key for unit in context.todo())
        finish_all(context)

    def units(count: int) -> Stage:
        return Stage("s", do, [Unit(f"s/{i}", {"i": i}) for i in range(count)])

    for count, expected in ((2, ["s/0", "s/1"]), (2, []), (3, ["s/2"])):
        ran.clear()
        assert run_stages([units(count)], open_session(tmp_path / "run")) is None
        assert ran == expected
    assert len(read_table(RunDirectory.at(tmp_path / "run"), "evaluations")) == 3


def test_the_time_of_a_stage_is_of_all_commands_whose_results_it_has(session):
    def seconds(*names: str, x: int = 0, derived: bool = False) -> float:
        units = [Unit(name, {"x": x}) for name in names]
        assert run_stages([Stage("s", finish_all, units, always_rerun=derived)], session) is None
        found = session.ledger.get("stages", "s")["duration_s"]
        session.ledger.put("stages", {"s": {**session.ledger.get("stages", "s"), **LONG}})
        return found

    LONG = {"duration_s": 1000.0}
    assert seconds("a", "b") < 1000
    assert seconds("a", "b", "c") > 1000
    assert seconds("d") > 1000
    assert seconds("d", x=1) < 1000
    assert seconds("d", x=1, derived=True) < 1000


def test_a_derived_stage_follows_what_it_summarizes(session):
    ran: list[str] = []

    def summarize(context: StageContext) -> None:
        ran.append("sum")
        finish_all(context)

    def stages(x: int) -> list[Stage]:
        return [
            Stage("a", finish_all, [Unit(f"a/{x}", {"x": x})]),
            stage("sum", "a", do=summarize, derived=True),
        ]

    for x, times in ((1, 1), (1, 1), (2, 2)):
        assert run_stages(stages(x), session) is None
        assert len(ran) == times


def test_a_failure_stops_only_what_needs_it_and_is_a_row(session):
    def fail(context: StageContext) -> None:
        raise RuntimeError("no luck")

    failed = run_stages(
        [stage("bad", do=fail), stage("after", "bad"), stage("other")],
        session,
    )
    assert failed is not None
    assert failed.startswith("bad: RuntimeError: no luck")
    assert statuses(session) == {"bad": "failed", "after": "skipped", "other": "succeeded"}
    row = read_table(session.run_dir, "failures").iloc[0]
    assert (row["stage"], row["attempt"], row["kind"]) == ("bad", 1, "error")
    assert "no luck" in row["message"]
    # mended, the run goes on where it stopped
    assert run_stages([stage("bad"), stage("after", "bad"), stage("other")], session) is None
    assert set(statuses(session).values()) == {"succeeded"}


def test_out_of_memory_is_a_status_of_its_own(session):
    def fail(context: StageContext) -> None:
        raise UnitError("bad", "out_of_memory", "full")

    assert run_stages([stage("bad", do=fail)], session) == "bad: bad: out_of_memory: full"
    assert statuses(session) == {"bad": "out_of_memory"}


def test_an_interruption_keeps_what_is_finished(session):
    def interrupt(context: StageContext) -> None:
        context.finish(context.stage.units[0])
        raise KeyboardInterrupt

    stages = composed([Stage("s", interrupt, [Unit("s/0", {}), Unit("s/1", {})])])
    with pytest.raises(KeyboardInterrupt):
        runner.run_stages(stages, session)
    assert statuses(session) == {"s": "interrupted"}
    ledger = Ledger(session.run_dir)
    assert [is_done(ledger, unit) for unit in stages[0].units] == [True, False]


def test_every_table_of_the_contract_is_written_even_empty(session):
    run_stages([stage("a")], session)
    written = set(session.run_dir.list(session.run_dir.path("results")))
    assert {table.name for table in CORE if not table.partitioned} <= written
    for table in written:
        assert "run_id" in read_table(session.run_dir, table)


def test_a_change_of_stored_results_is_refused_with_its_keys(session):
    def asked(max_iter: int, budget: int) -> list[Stage]:
        literals = {"lda": {"max_iter": max_iter}}
        unit = Unit("s", literals, budget=budget, budget_key="lda.evaluations")
        return [Stage("s", finish_all, [unit])]

    run_stages(asked(5, 10), session)
    resume(session, asked(5, 10))
    resume(session, asked(5, 20))  # more of the same
    with pytest.raises(ConfigError, match=r"lda.max_iter: stored 5, now 6"):
        resume(session, asked(6, 10))
    with pytest.raises(ConfigError, match=r"lda.evaluations: stored 10, now 4"):
        resume(session, asked(5, 4))


def test_a_failed_task_is_recorded_and_told(session):
    def divide(x: int) -> float:
        return 1 / x

    def do(context: StageContext) -> None:
        assert context.call("fine", divide, 4) == 0.25
        context.call("broken", divide, 0)

    failed = run_stages([stage("s", do=do)], session)
    assert failed is not None
    assert "ZeroDivisionError" in failed
    row = read_table(session.run_dir, "failures").iloc[0]
    assert (row["unit"], row["kind"], row["outcome"]) == ("broken", "error", "gave up")


class Uneven(Regression):
    """Samples 3 and 17 are the longest."""

    def lengths(self) -> Tensor:
        return torch.arange(SAMPLES).eq(3) * 90 + torch.arange(SAMPLES).eq(17) * 80 + 1

    def loss(self, model: nn.Module, batch: Any, context: StepContext) -> Loss:
        if len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen = Points(SAMPLES).x
        ids = [int((seen == row).all(1).nonzero()) for row in batch["x"]]
        OPENED.append((context.step, ids))
        return super().loss(model, batch, context)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the display says."""
    lines: list[str] = []
    say = lambda _, text, stage="": lines.append(f"{stage}: {text}")  # noqa: E731
    monkeypatch.setattr(Display, "say", say)
    return lines


OPENED: list[tuple[int, list[int]]] = []


def test_a_memory_trial_finds_what_fits_on_the_longest_samples(session, said):
    """The run itself then begins with what fitted, and its rows are its own alone."""
    OPENED.clear()
    training = TrainingSettings(
        micro_batch=16, accumulation=1, effective_batch=16, steps=5, log_every=1, eval_every=5
    )
    settings = TrainStageSettings(training=training, memory_trial=2)
    run_stages([train_stage("train", settings, lambda s, _: Uneven())], session)
    said = [line.partition("\n")[0] for line in said if "micro-batch" in line]
    assert said[1].endswith("again with micro-batch 4 x accumulation 4")
    assert said[2].startswith(
        "train: 2 steps on the longest samples fit: micro-batch 4 x accumulation 4"
    )
    assert OPENED[0] == (0, [3, 17, 0, 1])
    steps = read_table(session.run_dir, "steps")
    assert list(steps["step"]) == [1, 2, 3, 4, 5]
    (trial,) = read_table(session.run_dir, "trials").to_dict("records")
    assert (trial["status"], trial["micro_batch"], trial["attempts"]) == ("succeeded", 4, 3)
    assert list(read_table(session.run_dir, "failures")["kind"]) == ["out_of_memory"] * 2
    undisturbed = open_session(Path(session.run_dir.location) / "plain")
    plain = settings.model_copy(
        update={
            "memory_trial": 0,
            "training": training.model_copy(update={"micro_batch": 4, "accumulation": 4}),
        }
    )
    run_stages([train_stage("train", plain, lambda s, _: Uneven())], undisturbed)
    assert list(read_table(undisturbed.run_dir, "steps")["loss"]) == list(steps["loss"])


class Slow(Regression):
    """Loads each batch in 20 ms, which is nearly all of its step."""

    def collate(self) -> Callable[[list[Any]], Any]:
        def late(samples: list[Any]) -> Any:
            time.sleep(0.02)
            return default_collate(samples)

        return late


def test_a_training_says_how_long_it_waited_for_data(session: Session, said: list[str]) -> None:
    training = TrainingSettings(micro_batch=8, accumulation=1, effective_batch=8, steps=4)
    settings = TrainStageSettings(training=training)
    run_stages([train_stage("train", settings, lambda *_: Slow())], session)
    share = read_table(session.run_dir, "trials")["loader_wait_share"].item()
    assert 0.3 < share < 1
    assert f"train: waiting for data: {100 * share:.0f} % of the step" in said
