"""Logs of a stage's units and tasks: what they printed and why they failed; shown once each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from raypipe.errors import Trace, named
from raypipe.provenance import now
from raypipe.redaction import without_credentials
from raypipe.store.ledger import Row
from raypipe.store.run_directory import RunDirectory

#: logs per stage and command, different failures that are shown, and units that a message names
_MOST_LOGS, _MOST_SHOWN, _MOST_NAMED = 1000, 10, 100
#: characters of a line, of the message at the end of a command, and the lines of that one
_LONGEST_LINE, _LONGEST_END, _MOST_LINES = 300, 1000, 10
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Failure:
    """A failed attempt of a unit or task.

    Args:
        unit: its key.
        attempt: the number of the attempt, from 1.
        kind: a kind of failure (:data:`~raypipe.errors.FailureKind`).
        message: what went wrong.
        outcome: what follows, such as ``gave up``.
        trace: that of the exception.
        output: what the attempt printed.
        shown: False if the failure is an expected result.

    """

    unit: str
    attempt: int
    kind: str
    message: str
    outcome: str = ""
    trace: Trace | None = None
    output: str = ""
    shown: bool = True

    def row(self) -> Row:
        """Return the row of the table ``failures``, without credentials."""
        return {
            "unit": self.unit,
            "attempt": self.attempt,
            "kind": self.kind,
            "message": without_credentials(self.message),
            "frame": without_credentials(self.trace.frame) if self.trace is not None else None,
            "traceback": without_credentials(self.trace.text) if self.trace is not None else None,
            "outcome": self.outcome,
            "at": now(),
        }


class UnitLogs:
    """Writes ``RUN_DIR/logs/<unit>.log`` for units that print or fail, and shows failures.

    Of failures of one kind, at one place and with one message apart from numbers, the first is
    shown as it happens, and the others are named at the end of the stage. Beyond 1,000 units per
    stage, no more logs are written: files are not for mass output.

    Args:
        run_dir: the run directory of the stage's variant.
        stage: the stage's name, which the names of all its units' logs begin with.
        say: shows text to the user.

    """

    def __init__(self, run_dir: RunDirectory, stage: str, say: Callable[[str], None]) -> None:
        self._run_dir, self._stage, self._say = run_dir, stage, say
        self._lock = Lock()
        self._written: set[str] = set()
        #: the units of equal failures, one per attempt; only failures that are not expected results
        self._alike: dict[tuple[str, ...], list[str]] = {}
        self.any_failed = False

    def file(self, unit: str) -> str:
        """Return the name of the log of a unit in the folder of logs."""
        return self._run_dir.log(self._full(unit)).rpartition("/")[2]

    def printed(self, unit: str, attempt: int, output: str) -> None:
        """Write the output of a task that succeeded."""
        self._write(unit, f"attempt {attempt}: succeeded", output)

    def failed(self, failure: Failure) -> None:
        """Write a failed attempt with its output and traceback; show it if none was like it."""
        trace, message = failure.trace or Trace(), first_line(failure.message)
        title = f"attempt {failure.attempt}: {failure.kind}"
        then = f"; {failure.outcome}" * bool(failure.outcome)
        text = trace.text or failure.message
        log = self._write(failure.unit, title + then, failure.output, text)
        like = failure.kind, trace.frame, _NUMBER.sub("0", message), failure.outcome
        self.any_failed = True
        if not failure.shown:
            return
        with self._lock:
            units = self._alike.setdefault(like, [])
            units.append(self._full(failure.unit))
            if len(units) > 1 or len(self._alike) > _MOST_SHOWN:
                return
        lines = [f"{self._full(failure.unit)}: {title}: {message}{then}"]
        lines += [f"  at {_near(trace.frame)}"] if trace.frame else []
        lines += [f"  log: {log}"] if log else []
        self._say("\n".join(lines))

    def close(self) -> None:
        """Name the units of failures like those shown, and count those that were not shown."""
        for like, units in [*self._alike.items()][:_MOST_SHOWN]:
            others = [unit for unit in units if unit != units[0]]  # without its own attempts
            if others:
                names = named(list(dict.fromkeys(others)), _MOST_NAMED)
                times = f"{len(others)} more time(s)"
                self._say(f"{units[0]}: the same {like[0]} {times}: {names}")
        if (rest := len(self._alike) - _MOST_SHOWN) > 0:
            stage = self._run_dir.trial_id(self._stage)
            self._say(f"{stage}: {rest} more failures are in the table `failures`")

    def _full(self, unit: str) -> str:
        """Return the name of a unit in the whole run, which begins with its stage."""
        is_named = unit.partition("/")[0] == self._stage
        return self._run_dir.trial_id(unit if is_named else f"{self._stage}/{unit}")

    def _write(self, unit: str, title: str, *texts: str) -> str:
        """Append texts to the log of a unit; return its name for the user, empty without one."""
        name = self._full(unit)
        path = self._run_dir.log(name)
        with self._lock:
            if path not in self._written and len(self._written) >= _MOST_LOGS:
                return ""
            self._written.add(path)
        lines = [f"# {name}, {title}, {now()}", *(text.rstrip() for text in texts if text.strip())]
        content = without_credentials("\n".join(lines) + "\n")
        try:
            self._run_dir.append(path, content.encode(errors="replace"))
        except OSError:  # the ledger, which is on the same disk, reports it
            return ""
        return _near(f"{self._run_dir.shown}/logs/{self.file(unit)}")


def first_line(text: str) -> str:
    """Return the first line of a text, cut to what a few lines of a terminal hold.

    A line that ends with a colon says nothing alone (``ValueError:``): the next one follows it.
    """
    first, *others = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
    if first.endswith(":") and others:
        first = f"{first} {others[0]}"
    return first[:_LONGEST_LINE]


def brief(text: str, most: int = _LONGEST_END) -> str:
    """Return a message as the end of a command shows it: cut if it fills the screen."""
    if len(text) <= most and text.count("\n") < _MOST_LINES:
        return text
    return f"{first_line(text)} ... (cut; its log has the whole message)"


def _near(path: str) -> str:
    """Return a path relative to the current directory, if it lies below."""
    here = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(here)
