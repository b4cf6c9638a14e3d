"""Work behind the longer verbs, and what several of them share."""

import os
import re
from contextvars import ContextVar

from raypipe.errors import ConfigError

#: the environment variable with the folder or URI in which runs get their directories
RUNS = "RAYPIPE_RUNS"

#: whether Ray stops with the command that started it; in Python it goes on for the next call
stops_with_command: ContextVar[bool] = ContextVar("stops_with_command", default=False)

_WITH_UNITS = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"))
_UNITS_S = (86400, 3600, 60, 1)


def runs_location() -> str:
    """Return the folder or URI in which runs get their directories by default."""
    return os.environ.get(RUNS) or "runs"


def seconds_of(text: str, option: str = "--time-budget") -> float:
    """Return the seconds of a time: ``2h``, ``1h30m``, ``3600s``.

    Raises:
        ConfigError: it has another form, or is zero.

    """
    match = _WITH_UNITS.fullmatch(text)
    numbers = match.groups() if match else ()
    if total := sum(float(n or 0) * s for n, s in zip(numbers, _UNITS_S, strict=False)):
        return total
    raise ConfigError(
        f"{option} {text!r}: must be a time above zero, such as 2h, 90m, 1h30m, 3600s"
    )
