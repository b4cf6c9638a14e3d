"""Time budget of a command: near its end trainings save checkpoints, and the command ends."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raypipe.errors import ConfigError
from raypipe.graph.launcher import Launcher

#: seconds for what follows the work: ending processes, writing the tables, stopping Ray
_SHUTDOWN_S = 15.0
#: of these, the seconds after an end that was not orderly
_CUT_S = 8.0
_POLL_S = 0.25

_WITH_UNITS = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"))
#: as SLURM writes: days-hours, days-hours:minutes[:seconds], [hours:]minutes:seconds
_WITH_COLONS = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d\d){0,2})")
_UNITS_S = (86400, 3600, 60, 1)


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


class TimeBudget:
    """The time that a command may take, from now on; None for any."""

    def __init__(self, text: str | None) -> None:
        self._end = None if text is None else time.monotonic() + seconds_of(text)
        #: whether the command was ended since its time was over
        self.is_over = False

    @contextmanager
    def watched(self, launcher: Launcher, say: Callable[[str], None]) -> Iterator[None]:
        """Raise KeyboardInterrupt in the body's main thread when the time is nearly over.

        Before that, running trainings save checkpoints and end, and pools start no more tasks. As
        much time is kept for it as the trainings have measured that they need.
        """
        if self._end is None:
            yield
            return
        end, done, lock = self._end, threading.Event(), threading.Lock()

        def watch() -> None:
            while end - time.monotonic() > launcher.ending_s + _SHUTDOWN_S:
                if done.wait(_POLL_S):
                    return
            with lock:
                if done.is_set():
                    return
                self.is_over = True
                say("the time budget is nearly over: trainings save checkpoints, no task starts")
                launcher.wind_down()
            while not launcher.is_at_rest and end - time.monotonic() > _CUT_S:
                if done.wait(_POLL_S):
                    return
            with lock:
                if not done.is_set() and (main := threading.main_thread().ident) is not None:
                    # as the signal of a batch system; a flag would not end waits of the main thread
                    signal.pthread_kill(main, signal.SIGTERM)

        threading.Thread(target=watch, name="time budget", daemon=True).start()
        try:
            yield
        finally:
            with lock:
                done.set()
