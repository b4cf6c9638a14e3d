"""Stages of any graph: what runs, overlaps, waits and is recorded, and what an end leaves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from example_tasks import SAMPLES, Regression
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from raypipe.errors import UnitError
from raypipe.graph import runner
from raypipe.graph.context import Session, StageContext
from raypipe.graph.experiment import Stage, Unit, in_order, with_needs
from raypipe.graph.launcher import PoolOptions
from raypipe.graph.progress import Durations
from raypipe.graph.stored_results import is_done
from raypipe.graph.tables import CORE
from raypipe.graph.training_stage import train_stage
from raypipe.graph.unit_logs import Failure
from raypipe.launch.inline import InlineLauncher
from raypipe.store.ledger import Ledger
from raypipe.store.tables import read_table
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from tests.raypipe.composed import HERE, composed, run_stages, session_in
from tests.scenario import cases

Do = Callable[[StageContext], None]
WAIT_S = 400
ORDERS = cases(__file__, "orders")


class Threads(InlineLauncher):
    """Stages in threads; what they launch runs in the thread of each."""

    concurrent = True


def finish(context: StageContext) -> None:
    for unit in context.todo():
        context.ledger.put("evaluations", {unit.key: {"dataset": unit.key, "value": 1.0}})
        context.finish(unit)


def stage(name: str, *needs: str, do: Do = finish, derived: bool = False) -> Stage:
    return Stage(name, do, [Unit(name, {"of": name})], needs, always_rerun=derived)


def studies(do: Do, *needs: tuple[str, ...]) -> Stage:
    """A stage of one unit for each of the needs."""
    units = [Unit(f"studies/{place}", {"of": place}, each) for place, each in enumerate(needs)]
    every = tuple(dict.fromkeys(need for each in needs for need in each))
    return Stage("studies", do, units, ("check", *every))


def after(event: threading.Event) -> Do:
    def do(context: StageContext) -> None:
        assert event.wait(WAIT_S)
        finish(context)

    return do


def fail(context: StageContext) -> None:
    raise RuntimeError("no luck")


def endless(context: StageContext) -> None:
    with context.pool(PoolOptions(1)) as pool:
        while True:
            pool.submit("nothing", int)
            context.finished(pool)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return session_in(tmp_path / "run", Threads())


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C, for a thread to press: the main thread gets the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def statuses(session: Session) -> dict[str, str]:
    rows = read_table(session.run_dir, "stages")
    return dict(zip(rows["stage"], rows["status"], strict=True))


def test_stages_come_after_their_needs_and_otherwise_as_given() -> None:
    given = [stage(name, *needs) for name, needs in ORDERS["stages"].items()]
    for wanted, order in ORDERS["wanted"]:
        assert [each.name for each in with_needs(given, wanted)] == order
    ladder = [stage("0a"), stage("0b")]
    for step in range(1, 60):  # 2**60 ways down
        above = (f"{step - 1}a", f"{step - 1}b")
        ladder += [stage(f"{step}a", *above), stage(f"{step}b", *above)]
    assert len(in_order(ladder)) == 120


@pytest.mark.parametrize(("stages", "told"), ORDERS["refused"])
def test_stages_that_cannot_be_ordered(stages: list[list[str]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        in_order([stage(*each) for each in stages])


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[str, list[str]]]:
    names = [f"s{number}" for number in range(draw(st.integers(1, 9)))]
    return [
        (name, draw(st.lists(st.sampled_from(names[:place]), unique=True)) if place else [])
        for place, name in enumerate(names)
    ]


@settings(max_examples=15, deadline=None)
@given(graphs(), st.data(), st.sampled_from([Threads, InlineLauncher]), st.integers(1, 3))
def test_every_stage_runs_once_after_its_needs(tmp_path_factory, graph, data, launcher, most):
    """Also if the graph grows; a failure stops what needs it; some stages run alone."""
    some = st.sets(st.sampled_from([name for name, _ in graph]), max_size=2)
    alone, bad, start = data.draw(some), data.draw(some), data.draw(st.integers(0, len(graph)))
    lock, running, over, expected = threading.Lock(), set[str](), list[str](), {}
    is_inline = launcher is InlineLauncher

    def do(context: StageContext) -> None:
        name = context.stage.name
        with lock:
            assert (threading.current_thread() is threading.main_thread()) == is_inline
            assert not running or not alone & {name, *running}
            assert len(running) < most
            assert set(context.stage.needs) <= set(over)
            running.add(name)
        time.sleep(0.001)
        with lock:
            running.remove(name)
            over.append(name)
        (fail if name in bad else finish)(context)

    for name, needs in graph:
        is_skipped = any(expected[need] != "succeeded" for need in needs)
        expected[name] = "skipped" if is_skipped else "failed" if name in bad else "succeeded"
    made = composed([stage(name, *needs, do=do) for name, needs in graph])
    made = [replace(each, alone=each.name in alone) for each in made]
    known, later = made[:start], made[start:]

    def grow(*_: Any) -> list[Stage]:
        added = later[:2]
        del later[:2]
        return added

    session = session_in(tmp_path_factory.mktemp("graph"), launcher())
    with patch.object(runner, "_MOST_STAGES", most):
        first = runner.GraphRunner(session, grow).run(known)
    assert statuses(session) == expected
    assert sorted(over) == sorted(name for name in expected if expected[name] != "skipped")
    assert (first is None) == (set(expected.values()) == {"succeeded"})


def test_one_stage_at_a_time_runs_in_this_thread_and_the_longest_path_first(session, tmp_path):
    run_stages([stage("a")], session)
    ran: list[tuple[str, bool]] = []

    def do(context: StageContext) -> None:
        ran.append((context.stage.name, threading.current_thread() is threading.main_thread()))
        finish(context)

    assert run_stages([stage("a", do=do), stage("b", do=do)], session) is None
    assert ran == [("b", True)]  # the only one that is left
    stages = [stage("x", do=do), stage("a", do=do), stage("b", "a", do=do), stage("c", "b", do=do)]
    assert run_stages(stages, session_in(tmp_path / "inline")) is None
    assert ran[1:] == [(name, True) for name in "abxc"]


def test_a_stage_whose_failure_cannot_be_recorded_has_failed(session, monkeypatch):
    monkeypatch.setattr(StageContext, "fail", lambda *_: Path("missing").read_text())
    with pytest.raises(FileNotFoundError):
        run_stages([stage("a", do=fail)], session)
    assert statuses(session) == {"a": "failed"}


@pytest.mark.parametrize("ends", ["signal", KeyboardInterrupt, SystemExit])
def test_what_ends_the_command_ends_all_stages_and_keeps_what_is_finished(session, interrupt, ends):
    """Ctrl-C, or a stage that is to end it. An error that follows is part of it: Ray has ended."""
    both = threading.Barrier(2, timeout=WAIT_S)

    def first_unit(context: StageContext) -> None:
        context.finish(context.stage.units[0])
        if both.wait() == 0 and ends == "signal":
            interrupt()
        elif context.stage.name == "a" and ends != "signal":
            raise ends
        with suppress(KeyboardInterrupt):
            endless(context)
        raise RuntimeError("Ray has not been started yet")

    units = {name: [Unit(f"{name}/0", {}), Unit(f"{name}/1", {})] for name in "ab"}
    stages = composed([*(Stage(n, first_unit, units[n]) for n in "ab"), stage("c", "a")])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        runner.GraphRunner(session).run(stages)
    assert statuses(session) == {"a": "interrupted", "b": "interrupted"}
    assert not session.ledger.rows("failures")
    ledger = Ledger(session.run_dir)
    for each in stages[:2]:
        assert [is_done(ledger, unit) for unit in each.units] == [True, False]


def test_what_stages_record_at_the_same_time_is_all_there(session):
    def record(context: StageContext) -> None:
        for unit in context.stage.units:
            context.fail(Failure(unit.key, 1, "error", "rehearsed"))
            context.ledger.put("evaluations", {unit.key: {"dataset": unit.key, "value": 1.0}})
            context.ledger.put("passing", {unit.key: {"x": 1}})
            context.finish(unit)
            context.ledger.remove("passing", [unit.key])

    stages = composed([Stage(n, record, [Unit(f"{n}/{i}") for i in range(15)]) for n in "abcd"])
    assert runner.GraphRunner(session).run(stages) is None
    read = Ledger(session.run_dir, writable=False)
    for table in ("units", "failures", "evaluations", "stages"):
        assert sorted(map(str, read.rows(table))) == sorted(map(str, session.ledger.rows(table)))
    keys = sorted(unit.key for each in stages for unit in each.units)
    assert all(is_done(read, unit) for each in stages for unit in each.units)
    assert read.rows("passing") == []
    assert sorted(read_table(session.run_dir, "failures")["unit"]) == keys
    assert sorted(read_table(session.run_dir, "evaluations")["dataset"]) == keys


@pytest.mark.parametrize("stays", [False, True])
def test_units_start_when_what_they_need_has_ended(session, stays):
    """The studies of no model run while the model trains, which waits for them here.

    The stage of studies has ended and runs again, or it still runs and takes the further ones.
    """
    started, calls = threading.Event(), []

    def study(context: StageContext) -> None:
        calls.append([unit.key for unit in context.todo()])
        if stays:
            started.set()
            while not (further := context.further_units()):
                time.sleep(0.001)
            calls.append([unit.key for unit in further])
        finish(context)
        started.set()

    train = stage("train", do=after(started))
    assert run_stages([stage("check"), train, studies(study, (), ("train",), ())], session) is None
    assert calls == [["studies/0", "studies/2"], ["studies/1"]]


def test_a_failed_need_leaves_out_only_the_units_that_name_it(session):
    needs = ((), ("good",), ("bad",), ("good", "bad"))
    last = [studies(finish, *needs), stage("last", "studies")]
    stages = [stage("check"), stage("good"), stage("bad", do=fail), *last]
    assert run_stages(stages, session) == "bad: RuntimeError: no luck"
    ended = {"check": "succeeded", "good": "succeeded", "bad": "failed"}
    assert statuses(session) == ended | {"studies": "failed", "last": "skipped"}
    done = {unit.key for unit in composed(stages)[3].units if session.ledger.get("units", unit.key)}
    assert done == {"studies/0", "studies/1"}
    assert run_stages([*stages[:2], stage("bad"), *last], session) is None  # mended
    assert set(statuses(session).values()) == {"succeeded"}


def test_a_stage_that_waits_for_further_units_ends_at_an_interruption(session, interrupt):
    def train(context: StageContext) -> None:
        while session.ledger.get("units", "studies/0") is None:
            time.sleep(0.01)
        time.sleep(0.1)
        interrupt()
        endless(context)

    stages = [stage("check"), stage("train", do=train), studies(finish, (), ("train",))]
    with pytest.raises(KeyboardInterrupt):
        run_stages(stages, session)
    assert statuses(session)["studies"] == "interrupted"
    assert session.ledger.get("units", "studies/0") is not None


def test_a_stage_that_started_early_is_not_waited_for_by_one_that_measures_speed(session):
    """It waits for others itself, which could not start."""
    is_early = threading.Event()

    def study(context: StageContext) -> None:
        is_early.set()
        finish(context)

    slow = stage("slow", do=after(is_early))
    measured = replace(stage("sweep", "slow"), alone=True)
    early = studies(study, (), ("slow", "sweep"))
    assert run_stages([stage("check"), slow, measured, early], session) is None


def test_the_time_of_a_stage_is_of_all_commands_whose_results_it_has(session):
    def seconds(*names: str, x: int = 0, derived: bool = False) -> float:
        units = [Unit(name, {"x": x}) for name in names]
        assert run_stages([Stage("s", finish, units, always_rerun=derived)], session) is None
        found = session.ledger.get("stages", "s")["duration_s"]
        session.ledger.put("stages", {"s": {**session.ledger.get("stages", "s"), **LONG}})
        return found

    LONG = {"duration_s": 1000.0}
    assert seconds("a", "b") < 1000
    assert seconds("a", "b", "c") > 1000
    assert seconds("d") > 1000
    assert seconds("d", x=1) < 1000
    assert seconds("d", x=1, derived=True) < 1000


def test_the_measured_time_of_a_stage_is_without_its_waits(tmp_path, monkeypatch):
    """It waits 7 s for each of two tasks, and 100 s for another stage.

    Tables that take 10 s to write are written after the first stage and at the end.
    """
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    for module in ("runner", "context"):
        monkeypatch.setattr(f"raypipe.graph.{module}.time", clock)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    started = threading.Event()

    def turn(seconds: float) -> None:
        clock.now += seconds

    def study(context: StageContext) -> None:
        for unit in context.todo():
            context.call(unit.key, turn, 7)
            turn(10)
            context.finish(unit)
        started.set()

    def train(context: StageContext) -> None:
        assert started.wait(WAIT_S)
        while "studies" in [thread.name for thread in threading.enumerate()]:
            time.sleep(0.001)
        turn(100)
        finish(context)

    writes = Mock(side_effect=lambda *_: turn(10))
    monkeypatch.setattr(runner.tables, "write_tables", writes)
    session = session_in(tmp_path / "run", Threads(), durations=Durations([HERE]))
    stages = composed([stage("check"), stage("train", do=train), studies(study, (), ("train",))])
    assert runner.GraphRunner(session).run(stages) is None
    found = session.durations.estimates([(stages[2], stages[2].units)])["studies"]
    assert (round(found.seconds), round(found.cpu_s), found.gpu_s) == (20, 0, 0)
    assert round(session.ledger.get("stages", "studies")["duration_s"]) == 127
    assert writes.call_count == 2


def test_a_failure_is_a_row_with_its_kind_and_out_of_memory_is_a_status_of_its_own(session):
    def full(context: StageContext) -> None:
        raise UnitError("full", "out_of_memory", "too large")

    def task(context: StageContext) -> None:
        assert context.call("fine", abs, -4) == 4
        context.call("broken", divmod, 1, 0)

    assert run_stages([stage("bad", do=fail)], session) == "bad: RuntimeError: no luck"
    assert run_stages([stage("full", do=full)], session) == "full: full: out_of_memory: too large"
    assert "ZeroDivisionError" in (run_stages([stage("task", do=task)], session) or "")
    assert statuses(session) == {"bad": "failed", "full": "out_of_memory", "task": "failed"}
    rows = read_table(session.run_dir, "failures").set_index("stage")
    columns = ["unit", "attempt", "kind", "outcome"]
    assert rows.loc["bad", columns].tolist() == ["bad", 1, "error", "gave up"]
    assert "no luck" in rows.loc["bad", "message"]
    assert rows.loc["full", columns].tolist() == ["full", 1, "out_of_memory", "gave up"]
    assert rows.loc["task", "unit"] == "broken"


def test_every_table_of_the_contract_is_written_even_empty(session):
    run_stages([stage("a")], session)
    written = set(session.run_dir.list(session.run_dir.path("results")))
    assert {table.name for table in CORE if not table.partitioned} <= written
    assert all("run_id" in read_table(session.run_dir, table) for table in written)


def test_a_memory_trial_finds_what_fits_on_the_longest_samples(capsys, tmp_path, monkeypatch):
    """The run begins with the size that fitted; its rows and its wait are without the trial."""
    session = session_in(tmp_path / "run", Threads())  # on the captured output
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>4")
    opened: list[list[int]] = []

    class Uneven(Regression):
        """Samples 3 and 17 are the longest; each batch is loaded in 20 ms, most of a step."""

        def lengths(self) -> torch.Tensor:
            return torch.arange(SAMPLES).eq(3) * 90 + torch.arange(SAMPLES).eq(17) * 80 + 1

        def collate(self) -> Callable[[list[Any]], Any]:
            def late(samples: list[Any]) -> Any:
                time.sleep(0.02)
                opened.append([int(sample["id"]) for sample in samples])
                return default_collate(samples)

            return late

    training = TrainingSettings(
        micro_batch=16, accumulation=1, effective_batch=16, steps=5, log_every=1, eval_every=5
    )
    settings = TrainStageSettings(training=training, memory_trial=2)
    run_stages([train_stage("train", settings, lambda s, _: Uneven())], session)
    said = capsys.readouterr().out.splitlines()
    _, again, fits, *_ = [line for line in said if "micro-batch" in line]
    assert again.endswith("again with micro-batch 4 x accumulation 4")
    assert fits.startswith(
        "train: 2 steps on the longest samples fit: micro-batch 4 x accumulation 4"
    )
    assert opened[0][:4] == [3, 17, 0, 1]
    steps = read_table(session.run_dir, "steps")
    assert list(steps["step"]) == [1, 2, 3, 4, 5]
    (trial,) = read_table(session.run_dir, "trials").to_dict("records")
    assert (trial["status"], trial["micro_batch"], trial["attempts"]) == ("succeeded", 4, 3)
    assert list(read_table(session.run_dir, "failures")["kind"]) == ["out_of_memory"] * 2
    assert 0.3 < trial["loader_wait_share"] < 1
    waited = f"{100 * trial['loader_wait_share']:.0f} % of the step"
    assert f"train: waiting for data: {waited}" in said
