"""The display: nothing wraps, every stage has its line, and the whole run is on the first one.

Expected time: proportional to work, per machine and settings, unknown for what is new.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from raypipe.graph import progress
from raypipe.graph.experiment import Stage, Training, Unit
from raypipe.graph.identity import Identity
from raypipe.graph.progress import Display, Durations, Estimate, clock_text, rough
from raypipe.hardware import Gpu, Hardware
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from tests.raypipe.composed import HERE
from tests.scenario import cases

CASES = cases(__file__, "progress")
LONG = "train_small@lda.objective=coherence,train_small.training.learning_rate=0.0003,seed=1"


def stage(name: str, *needs: str, budgets: tuple[int, ...] = (1,), **settings: object) -> Stage:
    identity = Identity.of({"experiment": "e", "study": settings}, {})
    units = [Unit(f"{name}/{i}", budget=b, identity=identity) for i, b in enumerate(budgets)]
    return Stage(name, lambda context: None, units, needs)


def expect(display: Display, **seconds: float | None) -> None:
    estimates = {name: None if s is None else Estimate(s) for name, s in seconds.items()}
    display.expect([stage(name) for name in seconds], estimates, 2, 0)


def shown(display: Display, columns: int, height: int = 24) -> list[str]:
    """The lines of the live display on a terminal of this size."""
    display.console = console = Console(width=columns, height=height, file=None)
    with console.capture() as captured:
        console.print(display.table(), crop=False, soft_wrap=False)
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test turns."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.mark.parametrize(("columns", "lines"), CASES["lines"].items())
def test_each_stage_has_one_line_that_fits_the_terminal(monkeypatch, clock, columns, lines):
    monkeypatch.setattr(progress, "machine_use", lambda: "CPU 7 %")
    display = Display()
    display.prepare("starting Ray on 2 CPUs")
    assert shown(display, 80) == CASES["before"]
    late = "late@x.by_18=1234567"
    expect(display, **{"lda": 1e4, LONG: None, late: None})
    display.start(late, "waiting for resources")
    display.begin("lda", 2160)
    display.begin(LONG, 100_000, 20_000)
    clock.now += 83.16
    display.advance("lda", 0, "0 computed, 3 running")
    display.advance(LONG, 40_000, note := "loss 0.6874  304 samples/s" * 5)
    assert shown(display, columns) == lines
    assert display.snapshot()["running"][-1] == CASES["running"] | {"note": note}
    assert [number for number, _ in display.snapshot()["messages"]] == [1, 2, 3]


@pytest.mark.parametrize(("height", "stages", "working", "lines", "last"), CASES["counted"])
def test_stages_without_a_line_are_counted_in_one(height, stages, working, lines, last):
    """Two lines of the terminal stay for messages."""
    display, names = Display(), [f"train@model.lr={n},seed=1" for n in range(stages)]
    expect(display, **dict.fromkeys(names))
    for name in names[:working]:
        display.begin(name, 100)
    for name in names[working : working + 5]:
        display.start(name, "waiting for resources", waits=True)
    shown_lines = shown(display, 80, height)
    assert (len(shown_lines), shown_lines[1][:14]) == (lines, "train lr=0 s1 ")
    assert shown_lines[-1].startswith(last)


def test_a_terminal_alone_has_colors_and_the_live_display(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    long = "b: succeeded in 1.0 s, eval loss 0.5" + 30 * " of 5"
    for color in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", color)
        with Display(live=False) as display:
            display.say(f"WARNING: {color}")
            display.fail("a/1: attempt 1: error")
            display.end("a", "failed", 1.0)
            display.end("b", "succeeded", 1.0, long[23:])
    lines = capsys.readouterr().out.splitlines()
    assert ["\x1b[33m" in line for line in lines] == 4 * [False] + [True] + 3 * [False]
    assert ["\x1b[31m" in line for line in lines] == 5 * [False] + [True, True, False]
    assert lines[3] == lines[7] == long
    with Display() as display:
        display.begin("a", 2)
    shown = capsys.readouterr().out
    assert "started" not in shown
    assert (shown[:6], shown[-23:]) == ("\x1b[?25l", "\x1b[?25h\r" + 2 * "\x1b[1A\x1b[2K")


def test_a_stage_that_advances_has_a_line_every_ten_seconds(capsys, clock):
    with Display(live=False) as display:
        display.begin("a", 1000)
        clock.now += 10
        for done in (100, 200, 500):
            display.advance("a", done, "loss 0.5")
            clock.now += 5
        expect(display, b=5)
        display.begin("b", 3, 1)
        clock.now += 20
        display.advance("b", 1)
    assert capsys.readouterr().out.splitlines() == CASES["plain"]


def test_messages_do_not_act_on_the_terminal_and_equal_warnings_are_shown_once(capsys):
    with Display() as display:
        display.say("calls/x=1: [b]\x1b[31mred\x1b[0m\x07\nsecond line")
        for number in range(2):
            display.say("WARNING: a column is empty", f"train@seed={number}")
        display.say("WARNING: another")
    assert capsys.readouterr().out.splitlines() == CASES["messages"]


def test_times_in_words(clock):
    assert {seconds: rough(seconds) for seconds in CASES["words"]} == CASES["words"]
    assert {seconds: clock_text(seconds) for seconds in CASES["clock"]} == CASES["clock"]
    display = Display()
    expect(display, a=4.0)
    display.begin("a", 1)
    for after, left in ((0, "about 4 s left"), (2, "about 2 s left"), (2, "overdue")):
        clock.now += after
        assert display.snapshot()["left"] == left
    display.settle("a")
    assert display.snapshot()["left"] == "about 0 s left"


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))


def test_time_is_the_median_rate_times_the_work_that_is_left():
    durations = Durations([HERE])
    measured = stage("s", budgets=(80, 80), seed=1, evaluations=80)
    for seconds in (16.0, 1000.0, 8.0):
        durations.remember(measured, measured.units, Estimate(seconds, 2 * seconds))
    durations.remember(measured, [], Estimate(1.0))
    more = stage("s", budgets=(100, 100, 100), seed=7, evaluations=100)
    found = durations.estimates([(more, more.units[:2]), (stage("t"), [])])
    assert found == {"s": Estimate(20.0, 40.0), "t": Estimate(0.0)}


@pytest.mark.parametrize(("measured", "asked", "factor"), CASES["trainings"])
def test_the_work_of_a_training_is_its_samples_or_its_epochs(measured, asked, factor):
    def training(**given):
        settings = TrainStageSettings(training=TrainingSettings(**given))
        training = Training(settings, lambda settings, run_dir: None)
        return replace(stage("train"), training=training)

    durations, before, after = Durations([HERE]), training(**measured), training(**asked)
    durations.remember(before, before.units, Estimate(10.0))
    assert durations.estimates([(after, after.units)]) == {"train": Estimate(10.0 * factor)}


def test_other_settings_and_other_machines_are_unknown():
    durations, measured = Durations([HERE]), stage("s", max_iter=5)
    durations.remember(measured, measured.units, Estimate(1.0))
    other = stage("s", max_iter=6)
    assert durations.estimates([(other, other.units)]) == {"s": None}
    larger = Hardware("there", 8, 2**30)
    gpu = Gpu(0, "uuid", "H100", 2**36, "9.0")
    for nodes in ([larger], [HERE, HERE], [replace(HERE, gpus=(gpu,))]):
        assert Durations(nodes).estimates([(measured, measured.units)]) == {"s": None}
    renamed = Durations([Hardware("another", 2, 2**31)])
    assert renamed.estimates([(measured, measured.units)]) != {"s": None}


UNITS = [Unit("s/free", needs=()), Unit("s/model", needs=("train",))]
STAGES = {
    "chain": [stage("a"), stage("b"), stage("c", "a", "b")],
    "early": [stage("train"), Stage("s", lambda context: None, UNITS, ("train",))],
}


@pytest.mark.parametrize(("stages", "times", "nodes", "seconds"), CASES["remaining"])
def test_stages_end_with_the_longest_chain_or_with_the_resources(stages, times, nodes, seconds):
    estimates = {key: known and Estimate(*known) for key, known in times.items()}
    assert progress.remaining(STAGES[stages], estimates, *nodes) == seconds


@pytest.mark.parametrize(("estimate", "elapsed", "part", "rest"), CASES["left"])
def test_a_stage_goes_on_at_its_own_rate_once_enough_of_it_is_done(estimate, elapsed, part, rest):
    found = progress.left(estimate and Estimate(*estimate), elapsed, part)
    assert found == (rest and Estimate(*rest))
