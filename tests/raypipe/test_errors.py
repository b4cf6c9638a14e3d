"""Tracebacks and messages of exceptions, whatever a user raises."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from raypipe.errors import Trace, UnitError, message_of, trace_of
from raypipe.launch.task import run_task
from raypipe.training.failure_kinds import unit_error

HERE = str(Path(__file__))


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def caught(function, *arguments) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def inner(x):
    return 1 / x


def outer(x):
    try:
        inner(x)
    except ZeroDivisionError as error:
        raise ValueError("boom") from error


def parse(text):
    json.loads(text)


class Model(nn.Module):
    def forward(self, x):
        raise KeyError("missing")


BY_ZERO = "ZeroDivisionError: division by zero"
NO_NAME = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"


@pytest.mark.parametrize(
    ("function", "argument", "frame", "error", "text"),
    [
        (inner, 0, " in inner", BY_ZERO, f"return 1 / x\n           ~~^~~\n{BY_ZERO}"),
        (outer, 0, " in outer", "ValueError: boom", f"{BY_ZERO}\n\nThe above exception was the"),
        (Model(), torch.ones(1), " in forward", "KeyError: 'missing'", 'raise KeyError("missing")'),
        (parse, "{", " in parse", f"json.decoder.JSONDecodeError: {NO_NAME}", "json/decoder.py"),
    ],
    ids=["a function", "a cause", "below torch", "above a library"],
)
def test_a_traceback_begins_and_ends_in_the_user_s_code(function, argument, frame, error, text):
    result = run_task("k", function, argument)
    assert (result.error, result.kind) == (error, "error")
    assert result.trace.text.startswith("Traceback (most recent call last):\n")
    assert text in result.trace.text
    assert result.trace.text.endswith(error)
    assert "raypipe/launch" not in result.trace.text
    assert "_call_impl" not in result.trace.text
    assert result.trace.frame.startswith(f"{HERE}:")
    assert result.trace.frame.endswith(frame)


def test_without_own_code_the_called_package_is_the_user_s():
    result = run_task("k", pow, 0, -1)
    assert result.error.startswith("ZeroDivisionError")
    assert result.trace.text.endswith(result.error)


def test_an_exception_that_cannot_be_shown_or_pickled_is_recorded():
    class LocalError(Exception):  # cannot be unpickled elsewhere
        def __init__(self, one, two):
            super().__init__(one)
            self.lock = (lambda: two, torch.Generator())

    def fail():
        raise LocalError("one", 2)

    def mute():
        raise MuteError

    for function, text in ((fail, "one"), (mute, "<exception str() failed>")):
        result = run_task("k", function)
        assert result.error.endswith(text)
        assert pickle.loads(pickle.dumps(result)) == result
        assert result.trace.frame.endswith(f"in {function.__name__}")
    assert unit_error("u", caught(mute)).message.endswith("<exception str() failed>")


def test_messages_and_tracebacks_are_bounded():
    assert len(message_of(ValueError("y" * 10**6))) < 11_000
    deep = caught(_recurse)
    assert len(trace_of(deep).text) < 51_000
    assert "in _recurse" in trace_of(deep).frame


def _recurse():
    return _recurse()


def test_groups_and_notes_are_shown():
    def fail():
        error = ExceptionGroup("several", [ValueError("first"), caught(inner, 0)])
        error.add_note("at point 7")
        raise error

    error = caught(fail)
    assert "at point 7" in message_of(error)
    assert "ValueError: first" in trace_of(error).text
    assert "ZeroDivisionError" in trace_of(error).text


def test_a_unit_error_keeps_its_trace_between_processes():
    error = unit_error("u", caught(outer, 0))
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, UnitError)
    assert isinstance(again.trace, Trace)
    assert again.trace == error.trace
    assert (again.kind, again.message) == ("error", "ValueError: boom")
