"""Request to a running training to save a checkpoint and end, agreed on by all workers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypipe.training.parallel import HostCopy, Worker

_KEY = "ending"
#: steps after which the answer of a GPU is read; until then the host runs ahead
_LAG = 2
#: bytes per second of a checkpoint that was not measured yet
_SAVED_PER_S = 200e6
#: of the longest step so far, from step to step
_DECAY = 0.99


@dataclass
class Ending:
    """Whether the training should end, which another thread sets; rank 0's counts.

    ``seconds`` is how long that may take: the step, the evaluation and the checkpoint in progress.
    """

    wanted: bool = False
    seconds: float = 0.0


class Agreement:
    """Agreement of all workers on the step at which they end.

    With several workers, the request is part of the exchange of the step's weights. On a GPU the
    answer is copied while training continues, and read two steps later. By then it has arrived
    unless the host is more than two steps ahead, so the device does not wait.
    """

    def __init__(self, ending: Ending, worker: Worker) -> None:
        self._ending, self._worker = ending, worker
        self._since, self._step_s = time.monotonic(), 0.0
        self._evaluation_s = self._save_s = 0.0
        self._answers: deque[HostCopy] = deque()

    def expect_save(self, model: nn.Module) -> None:
        """Estimate how long a checkpoint takes before one was saved: weights and two moments."""
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        self.took(save_s=3 * size / _SAVED_PER_S)

    def took(self, *, save_s: float = 0.0, evaluation_s: float = 0.0) -> None:
        """Record how long a checkpoint or an evaluation took; steps are measured by themselves."""
        self._save_s, self._evaluation_s = (
            save_s or self._save_s,
            evaluation_s or self._evaluation_s,
        )
        self._since = time.monotonic()

    def ask(self, sums: dict[str, Tensor]) -> None:
        """Add the request to the sums of a step, which are then exchanged."""
        if self._worker.workers > 1:
            wanted = float(self._worker.rank == 0 and self._ending.wanted)
            sums[_KEY] = torch.full((), wanted, device=self._worker.device, dtype=torch.float64)

    def reached(self, sums: dict[str, Tensor]) -> bool:
        """Whether to end after this step: the same on every worker. Takes the request from sums."""
        now = time.monotonic()
        self._step_s, self._since = max(now - self._since, _DECAY * self._step_s), now
        steps_s = (1 + _LAG) * self._step_s
        self._ending.seconds = steps_s + self._evaluation_s + self._save_s
        answer = sums.pop(_KEY, None)
        if answer is None:
            return self._ending.wanted
        self._answers.append(HostCopy(answer))
        if self._answers[-1].is_on_its_way and len(self._answers) <= _LAG:
            return False
        return bool(self._answers.popleft().values().item())
