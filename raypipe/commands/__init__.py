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
#: as SLURM writes: days-hours, days-hours:minutes[:seconds], [hours:]minutes:seconds
_WITH_COLONS = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d\d){0,2})")
_UNITS_S = (86400, 3600, 60, 1)


def runs_location() -> str:
    """Return the folder or URI in which runs get their directories by default."""
    return os.environ.get(RUNS) or "runs"


def seconds_of(text: str, option: str = "--time-budget") -> float:
    """Return the seconds of a time: ``2h``, ``1h30m``, ``3600s``, ``1:30:00``, ``1-12:00:00``.

    Raises:
        ConfigError: it has another form, or is zero.

    """
    total = 0.0
    if text and (match := _WITH_UNITS.fullmatch(text)):
        total = sum(float(n or 0) * s for n, s in zip(match.groups(), _UNITS_S, strict=True))
    elif (match := _WITH_COLONS.fullmatch(text)) and (match["days"] or ":" in text):
        numbers = [int(part) for part in match["parts"].split(":")]
        units = _UNITS_S[1:] if match["days"] else _UNITS_S[-len(numbers) :]
        total = int(match["days"] or 0) * _UNITS_S[0]
        total += sum(number * unit for number, unit in zip(numbers, units, strict=False))
    if not total:
        raise ConfigError(
            f"{option} {text!r}: must be a time above zero, such as 2h, 90m, 1h30m, 3600s, "
            "or as SLURM writes it: 1:30:00 (hours, minutes, seconds), 1-12:00:00 (with days)"
        )
    return total
