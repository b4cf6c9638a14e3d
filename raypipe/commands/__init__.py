"""Work behind the verbs: a module per verb, and what several of them share."""

import os
from contextvars import ContextVar

#: the environment variable with the folder or URI in which runs get their directories
RUNS = "RAYPIPE_RUNS"

#: whether Ray stops with the command that started it; in Python it goes on for the next call
stops_with_command: ContextVar[bool] = ContextVar("stops_with_command", default=False)


def runs_location() -> str:
    """Return the folder or URI in which runs get their directories by default."""
    return os.environ.get(RUNS) or "runs"
