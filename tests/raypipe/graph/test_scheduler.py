"""Concurrent stages: what overlaps, what waits, what is left when one of them ends badly."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.graph import runner, scheduler
from raypipe.graph.context import StageContext
from raypipe.graph.continuation import is_done
from raypipe.graph.experiment import Stage, Unit, in_order
from raypipe.graph.launcher import PoolOptions
from raypipe.graph.progress import Display
from raypipe.graph.scheduler import run_concurrently, run_in_sequence
from raypipe.graph.session import Session
from raypipe.graph.stages import train_stage
from raypipe.graph.unit_logs import Failure
from raypipe.hardware import Hardware
from raypipe.integrations.tracking import Trackers
from raypipe.launch.inline import InlineLauncher
from raypipe.store import tables as results
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table, write_tables
from raypipe.training.settings import ScalingSettings, TrainStageSettings
from tests.raypipe.composed import composed, run_stages

WAIT_S = 400
CPU_NODE = Hardware("here", 2, 2**30)


class Threads(InlineLauncher):
    """Stages in threads; what they launch runs in the thread of each."""

    concurrent = True


Do = Callable[[StageContext], None]


def finish(context: StageContext) -> None:
    for unit in context.todo():
        context.finish(unit)


def stage(name: str, *needs: str, gpu: bool = False, do: Do = finish, derived=False) -> Stage:
    return Stage(name, do, [Unit(name, {"of": name})], needs, always_rerun=derived, on_gpu=gpu)


def open_session(folder: Path, launcher: InlineLauncher | None = None) -> Session:
    run = RunDirectory.at(folder)
    none = Trackers((), run, "r", "example", {})
    return Session(run, "r", Ledger(run), launcher or Threads(), Display(), [CPU_NODE], none)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return open_session(tmp_path / "run")


def statuses(session: Session) -> dict[str, str]:
    rows = read_table(session.run_dir, "stages")
    return dict(zip(rows["stage"], rows["status"], strict=True))


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C, for a thread to press: the main thread gets the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [2, 8])
def test_stages_that_need_nothing_run_at_the_same_time(session, number):
    all_of_them = threading.Barrier(number, timeout=WAIT_S)

    def meet(context: StageContext) -> None:
        all_of_them.wait()
        finish(context)

    names = [f"s{place}" for place in range(number)]
    assert run_stages([stage(name, do=meet) for name in names], session) is None
    assert statuses(session) == dict.fromkeys(names, "succeeded")


def test_a_stage_that_may_start_does_not_wait_behind_one_that_may_not(session):
    fills = threading.Event()

    def train(context: StageContext) -> None:
        assert fills.wait(WAIT_S)
        finish(context)

    def fill(context: StageContext) -> None:
        fills.set()
        finish(context)

    stages = [stage("train", gpu=True, do=train), stage("late", "train"), stage("fill", do=fill)]
    assert run_stages(stages, session) is None
    assert set(statuses(session).values()) == {"succeeded"}


@st.composite
def graphs(draw: st.DrawFn) -> list[Stage]:
    names = [f"s{number}" for number in range(draw(st.integers(1, 9)))]
    return [
        stage(name, *(draw(st.lists(st.sampled_from(names[:place]), unique=True)) if place else ()))
        for place, name in enumerate(names)
    ]


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_every_stage_runs_once_after_what_it_needs(stages):
    lock, over = threading.Lock(), []

    def run(stage: Stage) -> None:
        with lock:
            assert set(stage.needs) <= set(over)
            over.append(stage.name)

    run_concurrently(in_order(stages), run, pytest.fail)
    assert sorted(over) == sorted(stage.name for stage in stages)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_a_graph_that_grows_runs_every_stage_once(stages, start, step, concurrent):
    """Stages may need any that were added before, whether these have ended or not."""
    lock, over = threading.Lock(), []
    later = in_order(stages)[start:]

    def run(stage: Stage) -> None:
        with lock:
            assert set(stage.needs) <= set(over)
            over.append(stage.name)

    def further() -> list[Stage]:
        added = later[:step]
        del later[:step]
        return added

    known = in_order(stages)[:start]
    if concurrent:
        run_concurrently(known, run, pytest.fail, further)
    else:
        run_in_sequence(known, run, further)
    assert sorted(over) == sorted(stage.name for stage in stages)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_a_failure_in_any_graph_stops_what_needs_it_and_an_error_ends_all(stages, data):
    """Any stage may raise; nothing that needs it starts, and ``interrupt`` ends what runs."""
    bad = data.draw(st.sampled_from(stages)).name
    over: list[str] = []
    interrupted = threading.Event()

    def run(stage: Stage) -> None:
        if stage.name == bad:
            raise RuntimeError(bad)
        over.append(stage.name)

    with pytest.raises(RuntimeError, match=bad):
        run_concurrently(in_order(stages), run, interrupted.set)
    assert interrupted.is_set()
    assert len(over) == len(set(over))
    after = {bad}
    for each in stages:
        if after & set(each.needs):
            after.add(each.name)
    assert not after & set(over)


def test_the_stage_with_the_longest_remaining_path_starts_first():
    stages = [stage("a"), stage("b"), stage("c", "b"), stage("d", "c"), stage("e", "a")]
    ran: list[str] = []
    run_concurrently(stages, lambda stage: ran.append(stage.name), pytest.fail)
    assert ran.index("b") == 0


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_nothing_runs_beside_a_stage_that_measures_speed(stages, data):
    names = data.draw(st.sets(st.sampled_from([each.name for each in stages]), max_size=3))
    lock, running, over = threading.Lock(), set[str](), []

    def run(stage: Stage) -> None:
        with lock:
            assert not running or not (stage.alone or running & names)
            running.add(stage.name)
        time.sleep(0.001)
        with lock:
            running.remove(stage.name)
            over.append(stage.name)

    graph = [replace(each, alone=each.name in names) for each in stages]
    run_concurrently(in_order(graph), run, lambda: None)
    assert sorted(over) == sorted(each.name for each in stages)


def test_a_stage_that_started_early_is_not_waited_for_by_one_that_measures_speed():
    """It waits for others itself, which could not start."""
    outcomes = scheduler.Outcomes()
    slow = Stage("slow", finish, [Unit("slow")])
    units = [Unit("one", needs=("quick",)), Unit("all", needs=("quick", "slow", "sweep"))]
    early = Stage("early", finish, units, ("quick", "slow", "sweep"))
    measured = Stage("sweep", finish, [Unit("sweep")], ("slow",), alone=True)

    def run(stage: Stage) -> None:
        begun.append(stage.name)
        if stage.name == "slow":
            assert is_early.wait(60)
        if stage.name == "early":
            is_early.set()
            outcomes.wait(["sweep"])
        outcomes.end(stage.key, None)

    begun, is_early = list[str](), threading.Event()
    run_concurrently([Stage("quick", finish), slow, measured, early], run, outcomes.interrupt)
    assert sorted(begun) == ["early", "quick", "slow", "sweep"]


def test_more_stages_than_threads_run_in_turn(monkeypatch):
    monkeypatch.setattr(scheduler, "_MOST_STAGES", 3)
    lock, running, most = threading.Lock(), [], []

    def run(stage: Stage) -> None:
        with lock:
            running.append(stage.name)
            most.append(len(running))
        time.sleep(0.01)
        with lock:
            running.remove(stage.name)

    run_concurrently([stage(f"s{place}") for place in range(10)], run, pytest.fail)
    assert max(most) <= 3
    assert len(most) == 10


def test_without_concurrency_stages_run_in_this_thread_in_order(tmp_path):
    ran: list[tuple[str, bool]] = []

    def do(context: StageContext) -> None:
        ran.append((context.stage.name, threading.current_thread() is threading.main_thread()))
        finish(context)

    stages = [stage("a", do=do), stage("b", do=do)]
    assert run_stages(stages, open_session(tmp_path / "run", InlineLauncher())) is None
    assert ran == [("a", True), ("b", True)]


def test_a_single_stage_that_is_left_runs_in_this_thread(tmp_path):
    run_stages([stage("a")], open_session(tmp_path / "run"))
    threads = []

    def do(context: StageContext) -> None:
        threads.append(threading.current_thread())
        finish(context)

    assert run_stages([stage("a"), stage("b", do=do)], open_session(tmp_path / "run")) is None
    assert threads == [threading.main_thread()]


def test_a_failure_stops_only_what_needs_it_in_all_threads(session):
    failed = threading.Event()

    def fail(context: StageContext) -> None:
        raise RuntimeError("no luck")

    def after_the_failure(context: StageContext) -> None:
        assert failed.wait(WAIT_S)
        finish(context)

    def tell(context: StageContext) -> None:
        failed.set()
        finish(context)

    message = run_stages(
        [
            stage("bad", gpu=True, do=fail),
            stage("then", gpu=True, do=tell),
            stage("beside", do=after_the_failure),
            stage("summary", "bad", "beside", derived=True),
            stage("after", "beside", gpu=True),
        ],
        session,
    )
    assert message is not None
    assert message.startswith("bad: RuntimeError: no luck")
    found = {"bad": "failed", "summary": "skipped"}
    assert statuses(session) == found | dict.fromkeys(["then", "beside", "after"], "succeeded")
    again = [stage(n, gpu=g) for n, g in (("bad", True), ("then", True), ("beside", False))]
    assert run_stages([*again, stage("summary", "bad", "beside", derived=True)], session) is None
    assert set(statuses(session).values()) == {"succeeded"}


def test_an_interruption_ends_both_and_keeps_what_is_finished(session, interrupt):
    both = threading.Barrier(2, action=interrupt, timeout=WAIT_S)

    def endless(context: StageContext) -> None:
        context.finish(context.stage.units[0])
        both.wait()
        with context.pool(PoolOptions(1)) as pool:
            while True:
                pool.submit("nothing", int)
                context.finished(pool)

    units = {name: [Unit(f"{name}/0", {}), Unit(f"{name}/1", {})] for name in "ab"}
    both_and_after = [Stage(n, endless, units[n], on_gpu=n == "a") for n in "ab"]
    stages = composed([*both_and_after, stage("c", "a")])
    with pytest.raises(KeyboardInterrupt):
        runner.run_stages(stages, session)
    assert statuses(session) == {"a": "interrupted", "b": "interrupted"}
    ledger = Ledger(session.run_dir)
    for each in stages[:2]:
        assert [is_done(ledger, unit) for unit in each.units] == [True, False]


def test_an_error_after_an_interruption_is_part_of_it(session, interrupt):
    """As the errors of Ray's functions after a second Ctrl-C has ended Ray."""

    def broken_by_the_end(context: StageContext) -> None:
        interrupt()
        with context.pool(PoolOptions(1)) as pool, suppress(KeyboardInterrupt):
            while True:
                pool.submit("nothing", int)
                context.finished(pool)
        raise RuntimeError("Ray has not been started yet")

    with pytest.raises(KeyboardInterrupt):
        run_stages([stage("a", do=broken_by_the_end), stage("b", "a"), stage("c", "a")], session)
    assert statuses(session) == {"a": "interrupted"}
    assert not session.ledger.rows("failures")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_stage_that_is_to_end_the_command_ends_the_other(session, error):
    started = threading.Event()

    def end(context: StageContext) -> None:
        assert started.wait(WAIT_S)
        raise error

    def endless(context: StageContext) -> None:
        started.set()
        with context.pool(PoolOptions(1)) as pool:
            while True:
                pool.submit("nothing", int)
                context.finished(pool)

    with pytest.raises(error):
        run_stages([stage("a", gpu=True, do=end), stage("b", do=endless)], session)
    assert statuses(session) == {"a": "interrupted", "b": "interrupted"}


def test_what_both_record_at_the_same_time_is_all_there(session):
    number = 40

    def record(context: StageContext) -> None:
        for unit in context.stage.units:
            context.fail(Failure(unit.key, 1, "error", "rehearsed"))
            context.ledger.put("evaluations", {unit.key: {"dataset": unit.key, "value": 1.0}})
            context.ledger.put("passing", {unit.key: {"x": 1}})
            context.say(unit.key)
            context.finish(unit)
            context.ledger.remove("passing", [unit.key])

    stages = composed(
        [
            Stage(name, record, [Unit(f"{name}/{i}", {"i": i}) for i in range(number)], on_gpu=gpu)
            for name, gpu in (("a", True), ("b", False), ("c", True), ("d", False))
        ]
    )
    assert runner.run_stages(stages, session) is None
    read = Ledger(session.run_dir, writable=False)
    for table in ("units", "failures", "evaluations", "stages"):
        assert sorted(map(str, read.rows(table))) == sorted(map(str, session.ledger.rows(table)))
    assert all(is_done(read, unit) for each in stages for unit in each.units)
    assert read.rows("passing") == []
    slots = sorted(unit.key for each in stages for unit in each.units)
    assert sorted(read_table(session.run_dir, "failures")["unit"]) == slots
    assert sorted(read_table(session.run_dir, "evaluations")["dataset"]) == slots


def test_the_tables_are_written_by_one_at_a_time(session, monkeypatch):
    """Or the one that read the rows first could write them last."""
    both, writing = threading.Barrier(2, timeout=WAIT_S), threading.Lock()

    def end_together(context: StageContext) -> None:
        finish(context)
        both.wait()

    def alone(*arguments) -> None:
        assert writing.acquire(blocking=False)
        time.sleep(0.1)  # for the other to come, if it could
        write_tables(*arguments)
        writing.release()

    monkeypatch.setattr(results, "write_tables", alone)
    stages = [stage("a", gpu=True, do=end_together), stage("b", do=end_together)]
    assert run_stages(stages, session) is None
    assert statuses(session) == {"a": "succeeded", "b": "succeeded"}


@pytest.mark.parametrize(("gpus", "expected"), [(None, True), (0.5, True), (0, False)])
def test_a_training_works_on_gpus_unless_it_is_told_not_to(gpus, expected):
    scaling = ScalingSettings(gpus_per_worker=gpus)
    made = train_stage("train", TrainStageSettings(scaling=scaling), pytest.fail)
    assert made.on_gpu is expected


def test_a_command_killed_before_it_wrote_the_tables_leaves_nothing_out(session):
    stages = composed([stage("a")])
    session.ledger.put("evaluations", {"e": {"dataset": "d", "value": 1.0}})
    StageContext(stages[0], session).finish(stages[0].units[0])  # and here it is killed
    assert read_table(session.run_dir, "evaluations").empty
    assert runner.run_stages(stages, session) is None
    assert read_table(session.run_dir, "evaluations")["value"].tolist() == [1.0]
    assert statuses(session) == {"a": "succeeded"}


def studies(do: Do, *needs: tuple[str, ...]) -> Stage:
    """A stage of one unit for each of the needs."""
    units = [Unit(f"studies/{place}", {"of": place}, each) for place, each in enumerate(needs)]
    every = tuple(dict.fromkeys(need for each in needs for need in each))
    return Stage("studies", do, units, ("check", *every))


def test_units_start_when_what_they_need_has_ended(session):
    """The studies of no model run while the model trains, which waits for them here."""
    first, calls = threading.Event(), []

    def study(context: StageContext) -> None:
        calls.append([unit.key for unit in context.todo()])
        finish(context)
        first.set()

    def train(context: StageContext) -> None:
        assert first.wait(WAIT_S)
        finish(context)

    stages = [stage("check"), stage("train", do=train), studies(study, (), ("train",), ())]
    assert run_stages(stages, session) is None
    assert calls == [["studies/0", "studies/2"], ["studies/1"]]
    assert set(statuses(session).values()) == {"succeeded"}


def test_a_running_stage_takes_further_units(session):
    started, calls = threading.Event(), []

    def study(context: StageContext) -> None:
        calls.append(None)
        units = context.todo()
        started.set()
        while units or context.await_units():
            for unit in units:
                context.finish(unit)
            units = context.further_units()

    def train(context: StageContext) -> None:
        assert started.wait(WAIT_S)
        finish(context)

    stages = [stage("check"), stage("train", do=train), studies(study, (), ("train",))]
    assert run_stages(stages, session) is None
    assert len(calls) == 1


def test_a_failed_need_leaves_out_only_the_units_that_name_it(session):
    def fail(context: StageContext) -> None:
        raise RuntimeError("no model")

    needs = ((), ("good",), ("bad",), ("good", "bad"))
    stages = [
        stage("check"),
        stage("good"),
        stage("bad", do=fail),
        studies(finish, *needs),
        stage("last", "studies"),
    ]
    assert run_stages(stages, session) == "bad: RuntimeError: no model"
    assert statuses(session) == {
        "check": "succeeded",
        "good": "succeeded",
        "bad": "failed",
        "studies": "failed",
        "last": "skipped",
    }
    done = {unit.key for unit in composed(stages)[3].units if session.ledger.get("units", unit.key)}
    assert done == {"studies/0", "studies/1"}
    stages[2] = stage("bad")
    assert run_stages(stages, session) is None
    assert set(statuses(session).values()) == {"succeeded"}


def test_a_stage_that_waits_for_further_units_ends_at_an_interruption(session, interrupt):
    def study(context: StageContext) -> None:
        finish(context)
        interrupt()
        assert context.await_units()

    gone = threading.Event()

    def train(context: StageContext) -> None:
        gone.wait(2)

    stages = [stage("check"), stage("train", do=train), studies(study, (), ("train",))]
    with pytest.raises(KeyboardInterrupt):
        run_stages(stages, session)
    assert statuses(session)["studies"] == "interrupted"
    assert session.ledger.get("units", "studies/0") is not None


def test_many_stages_that_wait_for_units_leave_threads_for_what_they_need(monkeypatch):
    """With 4 threads: 20 stages could start early, and need trainings that come after them."""
    monkeypatch.setattr(scheduler, "_MOST_STAGES", 4)
    over = {f"train{place}": threading.Event() for place in range(20)}

    def run(each: Stage) -> None:
        for need in each.needs:
            assert over[need].wait(WAIT_S)
        if each.name in over:
            over[each.name].set()

    early = [
        Stage(f"early{place}", finish, [Unit("a", needs=()), Unit("b", needs=(need,))], (need,))
        for place, need in enumerate(over)
    ]
    run_concurrently(in_order([*early, *map(stage, over)]), run, pytest.fail)
