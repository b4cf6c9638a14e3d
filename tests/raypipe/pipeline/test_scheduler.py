"""Stages beside each other: what overlaps, what waits, what is left when one of them ends badly."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.hardware import Gpu, Hardware
from raypipe.launch.inline import InlineLauncher
from raypipe.pipeline import runner
from raypipe.pipeline.context import Session, StageContext, is_done
from raypipe.pipeline.experiment import Stage, Unit, in_order
from raypipe.pipeline.launcher import PoolOptions
from raypipe.pipeline.progress import Display
from raypipe.pipeline.scheduler import run_concurrently
from raypipe.pipeline.stages import train_stage
from raypipe.storage import tables as results
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_table, write_tables
from raypipe.tracking import Target, Trackers
from raypipe.training.settings import ScalingSettings, TrainStageSettings
from tests.raypipe.composed import composed, run_stages

WAIT_S = 400
CPU_NODE = Hardware("here", 2, 2**30)
GPU_NODE = replace(CPU_NODE, gpus=(Gpu(0, "GPU-0", "card", 2**34, "9.0"),))

Do = Callable[[StageContext], None]


def finish(context: StageContext) -> None:
    for unit in context.todo():
        context.finish(unit)


def stage(name: str, *needs: str, gpu: bool = False, do: Do = finish, derived=False) -> Stage:
    return Stage(name, do, [Unit(name, {"of": name})], needs, always_rerun=derived, on_gpu=gpu)


def open_session(folder: Path, node: Hardware = GPU_NODE) -> Session:
    run = RunDirectory.at(folder)
    none = Trackers((), Target(run, "r", "example", {}))
    return Session(run, "r", Ledger(run), InlineLauncher(), Display(), [node], none)


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


def test_stages_on_gpus_run_beside_the_others(session):
    both = threading.Barrier(2, timeout=WAIT_S)

    def meet(context: StageContext) -> None:
        both.wait()
        finish(context)

    assert run_stages([stage("a", gpu=True, do=meet), stage("b", do=meet)], session) is None
    assert statuses(session) == {"a": "succeeded", "b": "succeeded"}


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_needs_come_first_and_of_a_kind_one_runs_at_a_time(data):
    names = [f"s{number}" for number in range(data.draw(st.integers(1, 9)))]
    stages = [
        stage(
            name,
            *data.draw(
                st.lists(st.sampled_from(names[:place]), unique=True) if place else st.just([])
            ),
            gpu=data.draw(st.booleans()),
        )
        for place, name in enumerate(names)
    ]
    lock, busy, over = threading.Lock(), [], []

    def run(stage: Stage) -> None:
        with lock:
            assert set(stage.needs) <= set(over)
            busy.append(stage.on_gpu)
            assert len(busy) == len(set(busy))
        with lock:
            busy.remove(stage.on_gpu)
            over.append(stage.name)

    run_concurrently(in_order(stages), run, pytest.fail)
    assert sorted(over) == names


@pytest.mark.parametrize(
    ("node", "stages"),
    [
        (CPU_NODE, [stage("a", gpu=True), stage("b")]),
        (GPU_NODE, [stage("a", gpu=True), stage("b", gpu=True)]),
        (GPU_NODE, [stage("a"), stage("b")]),
    ],
)
def test_one_kind_of_stages_runs_in_this_thread_in_order(tmp_path, node, stages):
    ran: list[tuple[str, bool]] = []

    def do(context: StageContext) -> None:
        ran.append((context.stage.name, threading.current_thread() is threading.main_thread()))
        finish(context)

    stages = [replace(each, run=do) for each in stages]
    assert run_stages(stages, open_session(tmp_path / "run", node)) is None
    assert ran == [("a", True), ("b", True)]


def test_what_is_stored_opens_no_lane(tmp_path):
    run_stages([stage("a", gpu=True)], open_session(tmp_path / "run"))
    threads = []

    def do(context: StageContext) -> None:
        threads.append(threading.current_thread())
        finish(context)

    stages = [stage("a", gpu=True), stage("b", do=do)]
    assert run_stages(stages, open_session(tmp_path / "run")) is None
    assert threads == [threading.main_thread()]


def test_a_failure_stops_only_what_needs_it_in_both_lanes(session):
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
            context.fail(unit.key, 1, "error", "rehearsed")
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
