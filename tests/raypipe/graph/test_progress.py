"""The display: nothing wraps, every stage has its line, and the whole run is on the first one.

Expected time: proportional to work, per machine and settings, unknown for what is new.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from raypipe.graph import progress
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.graph.progress import Display, Durations, Estimate, clock_text, rough
from raypipe.hardware import Gpu, Hardware
from tests.raypipe.composed import HERE

LONG = "train_small@lda.objective=coherence,train_small.training.learning_rate=0.0003,seed=1"


def stage(name: str, *needs: str, budgets: tuple[int, ...] = (1,), **settings: object) -> Stage:
    identity = Identity.of({"experiment": "e", "study": settings}, {})
    units = [Unit(f"{name}/{i}", budget=b, identity=identity) for i, b in enumerate(budgets)]
    return Stage(name, lambda context: None, units, needs)


def expect(display: Display, **seconds: float | None) -> None:
    estimates = {name: None if s is None else Estimate(s) for name, s in seconds.items()}
    display.expect([stage(name) for name in seconds], estimates, 2, 0)


def shown(display: Display, columns: int) -> list[str]:
    """The lines of the live display on a terminal of this size."""
    display.console = console = Console(width=columns, height=24, file=None)
    with console.capture() as captured:
        console.print(display.table(), crop=False, soft_wrap=False)
    return captured.get().rstrip("\n").splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_each_stage_has_one_line_that_fits_the_terminal(columns):
    display = Display()
    display.prepare("starting Ray on 2 CPUs")
    assert "starting Ray" in shown(display, 80)[0]
    expect(display, **{"lda": 1e4, LONG: None, "late": None})
    display.start("late", "waiting for resources")
    display.begin("lda", 2160)
    display.begin(LONG, 100_000)
    display.advance("lda", 0, "0 computed, 3 running")
    display.advance(LONG, 50_000, "loss 0.6874  304 samples/s" * 5)
    lines = shown(display, columns)
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0][:4] for line in lines] == ["run", "late", "lda", "trai"]
    if columns >= 80:
        assert "0/3" in lines[0]
        assert "unknown" in lines[0]
        assert "waiting for" in lines[1]
        assert "0/2160" in lines[2]
        assert "50000/100000" in lines[3]
    if columns == 200:
        assert lines[3].startswith("train_small objective=coherence learning_rate=0.0003 s1 ")


@pytest.mark.parametrize(
    ("working", "last"),
    [(3, "+57 waiting"), (40, "+20 running, +20 waiting"), (60, "+40 running")],
)
def test_stages_without_a_line_are_counted_in_one(working, last):
    """The terminal has 24 lines, of which two stay for messages."""
    display, names = Display(), [f"train@model.lr={n},seed=1" for n in range(60)]
    expect(display, **dict.fromkeys(names))
    for name in names[:working]:
        display.begin(name, 100)
    for name in names[working : working + 5]:
        display.start(name, "waiting for resources", waits=True)
    lines = shown(display, 80)
    assert len(lines) == 2 + min(working, 20)
    assert lines[1].startswith("train lr=0 s1 ")
    assert lines[-1].strip() == last


def test_warnings_and_failures_have_a_color_on_a_terminal_alone(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with Display() as display:
        for is_terminal in (True, False):
            display.console = Console(force_terminal=is_terminal, highlight=False)
            display.say(f"WARNING: {is_terminal}")
            display.fail("a/1: attempt 1: error")
            display.end("a", "failed", 1.0)
            display.end("b", "succeeded", 1.0, "eval loss 0.5")
    lines = capsys.readouterr().out.splitlines()
    assert ["\x1b[33m" in line for line in lines] == [True] + 7 * [False]
    assert ["\x1b[31m" in line for line in lines] == [False, True, True] + 5 * [False]
    assert lines[3] == lines[7] == "b: succeeded in 1.0 s, eval loss 0.5"


def test_a_stage_that_advances_has_a_line_every_ten_seconds(capsys, monkeypatch):
    with Display(live=False) as display:
        display.begin("a", 1000)
        for done in range(100):
            display.advance("a", done, "loss 0.5")
        monkeypatch.setattr(progress, "_PLAIN_PERIOD_S", 0.0)
        display.advance("a", 500, "loss 0.4")
        expect(display, b=1e-6)
        display.begin("b", 2)
        display.advance("b", 0)
    assert capsys.readouterr().out.splitlines() == [
        "a: started (1000 to do)",
        "a: 500/1000  loss 0.4  0 s left",
        "b: started (2 to do)",
        "b: 0/2  overdue",
    ]


def test_messages_do_not_act_on_the_terminal_and_equal_warnings_are_shown_once(capsys):
    with Display() as display:
        display.say("calls/x=1: \x1b[31mred\x1b[0m\x07\nsecond line")
        for number in range(3):
            display.say("WARNING: a column is empty", f"train@seed={number}")
        display.say("WARNING: another")
    assert capsys.readouterr().out.splitlines() == [
        *("calls/x=1: red ", "second line"),
        "train@seed=0: WARNING: a column is empty",
        "WARNING: another",
        "WARNING: a column is empty (3 times)",
    ]


def test_times_in_words():
    words = "0 s", "89 s", "2 min", "1.5 h", "1.5 d"
    assert tuple(rough(s) for s in (0, 89, 91, 5400, 130_000)) == words
    assert [clock_text(s) for s in (5.9, 83, 3723)] == ["0:05", "1:23", "1:02:03"]
    display = Display()
    expect(display, a=60.0)
    assert display.snapshot()["left"] == "about 60 s left"
    display = Display()
    expect(display, a=1e-6)
    display.begin("a", 1)
    time.sleep(0.01)
    assert display.snapshot()["left"] == "overdue"


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
    assert (found["s"].seconds, found["s"].cpu_s) == pytest.approx((20.0, 40.0))
    assert found["t"].seconds == 0


@pytest.mark.parametrize(
    ("measured", "asked", "factor"),
    [
        ({"steps": 100}, {"steps": 200}, 2),
        ({"steps": 100}, {"steps": 100, "effective_batch": 4}, 4),
        ({}, {"epochs": 3}, 3),
    ],
)
def test_the_work_of_a_training_is_its_samples_or_its_epochs(measured, asked, factor):
    def training(**length):
        settings = SimpleNamespace(**{"steps": 0, "effective_batch": None, "epochs": None} | length)
        job = SimpleNamespace(settings=SimpleNamespace(training=settings))
        return replace(stage("train"), training=job)

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


CHAIN = [stage("a"), stage("b"), stage("c", "a", "b")]
TIMES = {"a": Estimate(10, 10), "b": Estimate(30, 30), "c": Estimate(5, 5)}
UNITS = [Unit("s/free", needs=()), Unit("s/model", needs=("train",))]
EARLY = [stage("train"), Stage("s", lambda context: None, UNITS, ("train",))]


@pytest.mark.parametrize(
    ("stages", "times", "cpus", "gpus", "seconds"),
    [
        (CHAIN, TIMES, 8, 0, 35),
        (CHAIN, TIMES, 1, 0, 45),
        (CHAIN, {**TIMES, "b": None}, 8, 0, None),
        (CHAIN, {name: Estimate(10, 1, 80) for name in "abc"}, 8, 8, 30),
        (CHAIN, {name: Estimate(10, 1, 80) for name in "abc"}, 8, 4, 60),
        # it starts with its first units, and ends after all that it needs
        (EARLY, {"train": Estimate(100), "s": Estimate(40)}, 8, 0, 100),
        (EARLY, {"train": Estimate(100), "s": Estimate(400)}, 8, 0, 400),
    ],
)
def test_stages_take_as_long_as_the_longest_chain_or_as_the_resources_allow(
    stages, times, cpus, gpus, seconds
):
    assert progress.remaining(stages, times, cpus, gpus) == seconds


def test_a_stage_goes_on_at_its_own_rate_once_enough_of_it_is_done():
    assert progress.left(None, 5.0, 0.01) is None
    assert progress.left(None, 5.0, 0.5) == Estimate(5.0)
    assert progress.left(Estimate(10.0, 20.0), 4.0, 0.0) == Estimate(6.0, 12.0)
    assert progress.left(Estimate(10.0, 20.0), 40.0, 0.0) == Estimate(0.0, 0.0)
    assert progress.left(Estimate(10.0, 20.0), 10.0, 0.5) == Estimate(10.0, 20.0)
