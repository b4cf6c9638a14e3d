"""Errors that users see, and kinds of failures; any other exception is a bug."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FailureKind = Literal[
    "out_of_memory",
    "host_out_of_memory",
    "worker_died",
    "node_lost",
    "timeout",
    "invalid_value",
    "error",
]
#: failures of machines: the same work may succeed on a retry
TRANSIENT: frozenset[FailureKind] = frozenset({"worker_died", "node_lost", "host_out_of_memory"})

_LONGEST = 10_000


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


class UnitError(RuntimeError):
    """A unit of work ended without a result; ``kind`` becomes ``failures.kind``."""

    def __init__(
        self, unit: str, kind: FailureKind, message: str, limit: BatchLimit | None = None
    ) -> None:
        super().__init__(f"{unit}: {kind}: {message}")
        self.unit = unit
        self.kind = kind
        self.message = message
        self.limit = limit

    def __reduce__(self) -> tuple[type[UnitError], tuple[Any, ...]]:
        return type(self), (self.unit, self.kind, self.message, self.limit)


class PreemptionError(UnitError):
    """A training ended with a checkpoint since a node of its workers will be lost."""

    def __init__(self, unit: str, step: int) -> None:
        message = f"a node is about to be preempted; ended with a checkpoint at step {step}"
        super().__init__(unit, "node_lost", message)
        self.step = step

    def __reduce__(self) -> tuple[type[UnitError], tuple[Any, ...]]:
        return type(self), (self.unit, self.step)
