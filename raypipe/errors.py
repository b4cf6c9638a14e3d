"""Errors that users see, kinds of failures, and where in the user's code they were raised."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

#: kinds of failures, a cause before its consequences on other workers
FailureKind = Literal[
    "out_of_memory",
    "host_out_of_memory",
    "invalid_value",
    "compile_error",
    "error",
    "timeout",
    "worker_hung",
    "node_lost",
    "worker_died",
]
#: failures of machines: the same work may succeed on a retry
TRANSIENT: frozenset[FailureKind] = frozenset(
    {"worker_died", "worker_hung", "node_lost", "host_out_of_memory"}
)

#: characters of a message, and of a traceback
_LONGEST, _LONGEST_TRACE = 10_000, 50_000
_RAYPIPE = f"{Path(__file__).parent}/"
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
#: packages between raypipe and the user's code
_MACHINERY = frozenset({"python", "raypipe", "ray", "torch", "threadpoolctl.py"})


class ConfigError(ValueError):
    """A mistake in the command or the configuration: exit status 2, nothing started.

    The message is truncated if it would repeat a damaged file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...")


@dataclass(frozen=True)
class BatchLimit:
    """The number of samples per forward pass that exceeded memory, in training or evaluation."""

    where: Literal["training", "evaluation"]
    size: int


@dataclass(frozen=True)
class Trace:
    """The traceback of an exception, and the last frame of the user's code in it.

    ``frame`` is ``file:line in function``; it is empty if no frame is known.
    """

    text: str = ""
    frame: str = ""


class LostLeaseError(RuntimeError):
    """Another command has taken the run directory over.

    Attributes:
        holder: that command, in words.

    """

    def __init__(self, run: str, holder: str) -> None:
        super().__init__(
            f"{run}: {holder} took over, because this process or the store did not respond in time"
        )
        self.holder = holder


class EndedElsewhereError(Exception):
    """Another of the commands that share a run has written its tables, status and report."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, unlike a KeyboardInterrupt that the user's code raises.

    A command exits cleanly after it: after a plain one in an import, Python exits with -2.
    """


class UnitError(RuntimeError):
    """A unit of work ended without a result; ``kind`` becomes ``failures.kind``."""

    def __init__(
        self,
        unit: str,
        kind: FailureKind,
        message: str,
        limit: BatchLimit | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(f"{unit}: {kind}: {message}")
        self.unit = unit
        self.kind = kind
        self.message = message
        self.limit = limit
        self.trace = trace

    def __reduce__(self) -> tuple[type[UnitError], tuple[Any, ...]]:
        return type(self), (self.unit, self.kind, self.message, self.limit, self.trace)

    @property
    def status(self) -> str:
        """The status of the unit."""
        return "out_of_memory" if self.kind == "out_of_memory" else "failed"


def message_of(error: BaseException) -> str:
    """Return ``Type: text`` of an exception with its notes, even if its ``__str__`` raises."""
    shown = traceback.TracebackException(type(error), error, None, lookup_lines=False)
    return shortened("".join(shown.format_exception_only()).strip(), _LONGEST)


def trace_of(error: BaseException) -> Trace:
    """Return the traceback of an exception and of its causes.

    The frames of raypipe, Ray and torch above the user's code are left out. The user's code is what
    is not installed, or, without such a frame, the package that raypipe called. A frame of raypipe
    is never named: on a full disk the fault is not there.
    """
    shown = traceback.TracebackException.from_exception(error)
    last: traceback.FrameSummary | None = None
    for each in _chain(shown):
        if own := _own_frames(each.stack):
            last = last or each.stack[own[-1]]
            each.stack[:] = each.stack[own[0] :]
    if last is None and shown.stack and package_of(shown.stack[-1].filename) != "raypipe":
        last = shown.stack[-1]
    frame = f"{last.filename}:{last.lineno} in {last.name}" if last is not None else ""
    return Trace(shortened("".join(shown.format()).rstrip(), _LONGEST_TRACE), frame)


def shortened(text: str, most: int) -> str:
    """Return a text without its middle if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 2
    left_out = len(text) - most
    return f"{text[: most - tail]}\n... {left_out} characters left out ...\n{text[-tail:]}"


def named(names: Sequence[str], most: int = 3) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _chain(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception, its causes, and the members of groups."""
    waiting: list[traceback.TracebackException | None] = [shown]
    while waiting:
        if (each := waiting.pop()) is not None:
            yield each
            context = None if each.__suppress_context__ else each.__context__
            waiting += [*reversed(getattr(each, "exceptions", None) or ()), context, each.__cause__]


def _own_frames(stack: traceback.StackSummary) -> list[int]:
    """Return the positions of the frames of the user's code."""
    packages = [package_of(frame.filename) for frame in stack]
    users = None in packages
    called = next((each for each in packages if each not in _MACHINERY), None)
    return [n for n, each in enumerate(packages) if each == (None if users else called)]


def package_of(file: str) -> str | None:
    """Return the installed package that a file belongs to; None for the user's own code."""
    parts = Path(file).parts
    for place in _INSTALLED:
        if place in parts[:-1]:
            return parts[parts.index(place) + 1]
    if file.startswith(_RAYPIPE):
        return "raypipe"
    return "python" if file.startswith(("<frozen", *_PYTHON)) else None
