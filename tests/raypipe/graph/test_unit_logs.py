"""Logs of units, and what the terminal shows of failures."""

from __future__ import annotations

import pytest

from raypipe.errors import Trace
from raypipe.graph import unit_logs
from raypipe.graph.unit_logs import Failure, UnitLogs, first_line
from raypipe.store.run_directory import RunDirectory

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


@pytest.mark.parametrize(("number", "named", "more"), [(3, 2, ""), (1000, 100, " and 899 more")])
def test_of_equal_failures_one_is_shown_and_the_others_are_named(run, number, named, more):
    logs, said = opened(run)
    for n in range(number):
        logs.failed(Failure(f"lda/{n}", 1, "error", f"ValueError: no {n}", "gave up", TRACE))
    logs.close()
    assert len(said) == 2
    names = ", ".join(f"lda/{n}" for n in range(1, 1 + named))
    assert said[1] == f"lda/0: the same error {number - 1} more time(s): {names}{more}"


def test_different_failures_are_shown_up_to_a_limit(run):
    logs, said = opened(run)
    for n in range(200):
        trace = Trace("trace", f"code.py:{n} in score")
        logs.failed(Failure(f"lda/{n}", 1, "error", "ValueError", "gave up", trace))
    logs.failed(Failure("lda/200", 1, "out_of_memory", "as expected", shown=False))
    logs.close()
    assert [text.count("\n") for text in said] == [2] * 10 + [0]
    assert said[9].startswith("lda/9: attempt 1: error: ValueError; gave up\n  at code.py:9 ")
    assert said[-1] == "lda: 190 more failures are in the table `failures`"


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
    assert first_line("\n  Error: one\ntwo") == "Error: one"
    assert first_line("ValueError: \n\nAll fits failed.\nmore") == "ValueError: All fits failed."
    assert first_line("Error:") == "Error:"
    assert first_line(" \n") == ""
    assert len(first_line("a" * 1000)) == 300
