"""Fault injection for tests: the environment variable ``RAYPIPE_FAULTS``.

Faults are comma-separated and read where they would happen, in workers too:

``oom:micro_batch>N`` a training step with a larger micro-batch runs out of memory
``kill_worker:step=K`` rank 0 of a training run kills itself at step K of attempt 1
``kill_task:p=X`` a CPU task kills itself with probability X on its first attempt ``hang_task:p=X``
a CPU task never ends, with probability X on its first attempt ``delay_task:s=X`` each CPU task
first sleeps X seconds
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from dataclasses import dataclass

from raypipe.errors import ConfigError

VARIABLE = "RAYPIPE_FAULTS"
_PROBABILITY = r"(0?\.\d+|[01](?:\.0*)?)"
_FORMS = {
    "oom_above": r"oom:micro_batch>(\d+)",
    "kill_worker_at": r"kill_worker:step=(\d+)",
    "kill_task": rf"kill_task:p={_PROBABILITY}",
    "hang_task": rf"hang_task:p={_PROBABILITY}",
    "delay_task_s": r"delay_task:s=(\d*\.?\d+)",
}


@dataclass(frozen=True)
class Faults:
    """The faults to inject; none by default."""

    oom_above: float | None = None
    kill_worker_at: float | None = None
    kill_task: float = 0.0
    hang_task: float = 0.0
    delay_task_s: float = 0.0

    def at_step(self, step: int, micro_batch: int, rank: int, attempt: int) -> None:
        """Fail if a fault is set for this training step."""
        if self.oom_above is not None and micro_batch > self.oom_above:
            import torch

            raise torch.OutOfMemoryError(
                f"CUDA out of memory (rehearsed by {VARIABLE}: "
                f"micro-batch {micro_batch} > {self.oom_above:g})"
            )
        if self.kill_worker_at == step and rank == 0 and attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def at_task(self, identity: str, attempt: int) -> None:
        """Sleep, die or hang if a fault is set for this CPU task."""
        if self.delay_task_s:
            time.sleep(self.delay_task_s)
        if attempt > 1 or not (self.kill_task or self.hang_task):
            return
        draw = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8]) / 2**64
        if draw < self.kill_task:
            os.kill(os.getpid(), signal.SIGKILL)
        if 1 - draw < self.hang_task:
            signal.pause()


def from_environment() -> Faults:
    """Return the faults of ``RAYPIPE_FAULTS``.

    Raises:
        ConfigError: a fault has an unknown form.

    """
    wanted: dict[str, float] = {}
    for fault in filter(None, os.environ.get(VARIABLE, "").split(",")):
        for name, form in _FORMS.items():
            if match := re.fullmatch(form, fault.strip()):
                wanted[name] = float(match[1])
                break
        else:
            raise ConfigError(
                f"{VARIABLE}: {fault!r}: unknown fault (allowed: oom:micro_batch>N, "
                "kill_worker:step=K, kill_task:p=X, hang_task:p=X, delay_task:s=X)"
            )
    return Faults(**wanted)
