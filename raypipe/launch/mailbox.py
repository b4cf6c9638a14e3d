"""Mailbox between a command and the workers of its trainings.

Its actor imports this module, so it imports no torch, which takes seconds.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class Mailbox:
    """Actor between the trainings of a command and their workers: rows, and the wish to end.

    Rows go this way since Ray Train forwards none from a training in the process of its caller, and
    loses the last ones of a worker that dies.
    """

    def __init__(self) -> None:
        self._rows: defaultdict[str, list[dict[str, Any] | str]] = defaultdict(list)
        self._ends: set[str] = set()

    def post(self, training: str, row: dict[str, Any] | str) -> None:
        """Leave a row or a message for the command."""
        self._rows[training].append(row)

    def must_end(self, training: str) -> bool:
        """Whether a training should save a checkpoint and end."""
        return training in self._ends

    def collect(self, training: str, ends: bool) -> list[dict[str, Any] | str]:
        """Return what a training has left."""
        if ends:
            self._ends.add(training)
        return self._rows.pop(training, [])
