"""The display: nothing wraps, every stage has its line, and the whole run is on the first one."""

from __future__ import annotations

import threading
import time

import pytest
from rich.console import Console

from raypipe.graph import progress
from raypipe.graph.durations import Estimate
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.progress import Display, clock_text, remaining_text, rough
from raypipe.graph.remaining import Forecast, Remaining

LONG = "train_small@lda.objective=coherence,train_small.training.learning_rate=0.0003,seed=1"


def stages(*names: str) -> list[Stage]:
    return [Stage(name, lambda context: None, [Unit(name)]) for name in names]


def shown(display: Display, columns: int, height: int = 24) -> list[str]:
    """The lines of the live display on a terminal of this size."""
    display.console = Console(width=columns, height=height, record=True, file=None)
    with display.console.capture() as captured:
        display.console.print(display._rendered(), crop=False, soft_wrap=False)
    return captured.get().rstrip("\n").splitlines()


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_each_stage_has_one_line_that_fits_the_terminal(columns):
    display = Display()
    known = Estimate(1e4, 5e3, 2e4, 1e4, 0.0)
    display.expect(Forecast(stages("lda", LONG, "late"), {"lda": known}, 2))
    display.start("late", "waiting for resources")
    display.begin("lda", 2160)
    display.begin(LONG, 100_000)
    display.advance("lda", 0, "0 computed, 3 running")
    display.advance(LONG, 50_000, "loss 0.6874  304 samples/s" * 5)
    lines = shown(display, columns)
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0][:5] for line in lines] == ["0", "stage", "lda", "train", "late"]
    assert "0 of 3 stages done" in lines[0]
    if columns >= 80:
        assert "time left unknown" in lines[0]
        assert "0/2160" in lines[2]
        assert "0 computed, 3 running" in lines[2]
        assert "50000/100000" in lines[3]
        assert "waiting for resources" in lines[4]


def test_stages_beyond_the_terminal_are_counted():
    display = Display()
    names = [f"s{number}" for number in range(30)]
    for name in names:
        display.begin(name, 10)
    lines = shown(display, 80, height=12)
    assert len(lines) <= 12
    assert lines[-1].startswith("and 22 more")


def test_without_a_terminal_the_run_has_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_RUN_PERIOD_S", 0.01)
    said = threading.Event()
    with Display() as display:
        show = display._print
        monkeypatch.setattr(display, "_print", lambda text: (show(text), said.set()))
        display.expect(Forecast(stages("a", "b"), {"b": Estimate(200, 150, 400, 0, 0)}, 2))
        display.settle("a")
        display.start("b")
        said.clear()
        assert said.wait(10)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("run: "))
    assert line.startswith("run: 1 of 2 stages done, 0:0")
    assert "about 3 min left (2 to 7 min)" in line
    assert line.endswith("running: b")


def test_concurrent_stages_update_their_own_lines():
    display = Display()

    def work(name: str) -> None:
        display.begin(name, 200)
        for done in range(200):
            display.advance(name, done + 1, name)

    threads = [threading.Thread(target=work, args=(f"s{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        shown(display, 80)
        time.sleep(0)
    lines = shown(display, 80)
    assert len(lines) == 9
    assert all(line.split()[1] == "200/200" for line in lines[1:])
    display.end("s0", "succeeded", 1.0)
    assert len(shown(display, 80)) == len(lines) - 1


def test_what_precedes_the_stages_is_shown():
    display = Display()
    display.prepare("starting Ray on 2 CPUs")
    assert shown(display, 80) == ["starting Ray on 2 CPUs ... · 0:00 elapsed"]


def test_a_note_loses_its_last_parts_first():
    display = Display()
    display.begin("train", 1000)
    display.advance("train", 400, "loss 0.6874  eval mse 0.512  lr 0.0003  304 samples/s")
    narrow, wide = shown(display, 80)[1], shown(display, 120)[1]
    assert narrow.rstrip().endswith("loss 0.6874  eval mse 0.512  lr 0.0003")
    assert wide.rstrip().endswith("304 samples/s")
    assert "400/1000" in narrow


def test_a_debugger_has_the_terminal_to_itself(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_RUN_PERIOD_S", 0.01)
    with Display(live=False) as display:
        display.expect(Forecast(stages("a"), {}, 2))
        display.start("a")
        time.sleep(0.1)
        display.say("a line")
    assert capsys.readouterr().out == "a line\n"


def test_a_message_does_not_act_on_the_terminal(capsys):
    with Display(live=False) as display:
        display.say("calls/x=1: \x1b[31mred\x1b[0m\x07\nsecond line")
    assert capsys.readouterr().out == "calls/x=1: red \nsecond line\n"


@pytest.mark.parametrize(
    ("remaining", "text"),
    [
        (Remaining(200, 80, 400), "about 3 min left (80 s to 7 min)"),
        (Remaining(200, 150, 400), "about 3 min left (2 to 7 min)"),
        (Remaining(200), "about 3 min left"),
        (Remaining(30, 30.1, 30.2), "about 30 s left"),
        (Remaining(0.2, unknown=2), "time left unknown"),
        (Remaining(600, unknown=1), "time left unknown, at least 10 min"),
    ],
)
def test_the_remaining_time_in_words(remaining, text):
    assert remaining_text(remaining) == text


def test_times_in_words():
    assert [rough(s) for s in (0, 89, 91, 5400, 130_000)] == [
        "0 s",
        "89 s",
        "2 min",
        "1.5 h",
        "1.5 d",
    ]
    assert [clock_text(s) for s in (5.9, 83, 3723)] == ["0:05", "1:23", "1:02:03"]


def test_a_stage_that_takes_longer_than_expected_is_not_about_to_end():
    display = Display()
    display.expect(Forecast(stages("a"), {"a": Estimate(1e-6, 1e-6, 1e-6, 0, 0)}, 2))
    display.begin("a", 1)
    time.sleep(0.01)
    assert display.snapshot()["left"] == "longer than expected"
