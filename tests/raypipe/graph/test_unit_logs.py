"""Logs of units, and what the terminal shows of failures."""

from __future__ import annotations

import pytest

from raypipe.errors import Trace
from raypipe.graph import unit_logs
from raypipe.graph.unit_logs import Failure, UnitLogs, brief, first_line
from raypipe.store.run_directory import RunDirectory
from tests.scenario import cases

CASES = cases(__file__, "unit_logs")
TRACE = Trace("Traceback ...\nValueError: boom", "code.py:7 in score")


def opened(folder: RunDirectory, **options) -> tuple[UnitLogs, list[str]]:
    said: list[str] = []
    return UnitLogs(folder, "lda", said.append), said


def read(folder: RunDirectory, unit: str) -> str:
    return folder.read(folder.log(unit)).decode()


def test_attempts_follow_each_other_in_one_log_without_credentials(anywhere):
    logs, said = opened(anywhere)
    trace = Trace("at s3://key:secret@bucket/x")
    logs.failed(Failure("lda/0", 1, "worker_died", "it died", "again", trace, "s3://a:b@c"))
    opened(anywhere)[0].printed("lda/0", 2, "second\n")
    assert said[0].endswith("/logs/lda-0.log")
    lines = [line for line in read(anywhere, "lda/0").splitlines() if not line.startswith("#")]
    assert lines == ["s3://***@c", "at s3://***@bucket/x", "second"]


@pytest.mark.parametrize("case", CASES["failures"], ids=lambda case: case["name"])
def test_of_equal_failures_one_is_shown_and_the_others_are_named(run, case):
    logs, said = opened(run)
    for n in range(case["number"]):
        trace = Trace("trace", case["frame"].format(n))
        logs.failed(Failure(f"lda/{n}", 1, "error", f"ValueError: no {n}", "gave up", trace))
    logs.failed(Failure("lda/200", 1, "out_of_memory", "as expected", shown=False))
    logs.close()
    names = ", ".join(f"lda/{n}" for n in range(1, case["named"]))
    assert (len(said), said[case["at"]]) == (case["lines"], case["says"].format(names, run.shown))


def test_the_number_of_logs_is_bounded(run, monkeypatch):
    monkeypatch.setattr(unit_logs, "_MOST_LOGS", 3)
    logs, said = opened(run)
    for n in range(5):
        logs.printed(f"lda/{n}", 1, "hello")
    logs.failed(Failure("lda/4", 1, "error", "ValueError", "gave up", TRACE))
    logs.printed("lda/0", 2, "again")
    assert run.list(run.logs) == ["lda-0.log", "lda-1.log", "lda-2.log"]
    assert "log:" not in said[0]


@pytest.mark.parametrize("unit", ["a/b" * 300, "..", ".", "", "tab\tnew\nline", "ümläut=ß" * 60])
def test_every_name_of_a_unit_has_a_log(run, unit):
    logs, _ = opened(run)
    logs.printed(unit, 1, "hello")
    assert "hello" in read(run, f"lda/{unit}")
    assert len(run.list(run.logs)) == 1


def test_a_first_line_says_what_is_wrong():
    assert {text: first_line(text) for text in CASES["lines"]} == CASES["lines"]
    assert first_line("a" * 1000) == "a" * 300
    for whole in ("a" * 1000, "\n".join("0123456789")):
        assert brief(whole) == whole
        assert brief(f"{whole}\n").endswith(" ... (cut; its log has the whole message)")
