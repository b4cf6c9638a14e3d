"""Request to a running training to save a checkpoint and end, agreed on by all workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from raypipe.training.parallel import HostCopy, Worker

_KEY = "ending"
#: steps after which the answer of a GPU is read; until then the host runs ahead
LAG = 2


@dataclass
class Ending:
    """Whether the training should end, which another thread sets; rank 0's counts."""

    wanted: bool = False


class Agreement:
    """Agreement of all workers on the step at which they end.

    With several workers, the request is part of the exchange of the step's weights. On a GPU the
    answer is copied while training continues, and read two steps later. By then it has arrived
    unless the host is more than two steps ahead, so the device does not wait.
    """

    def __init__(self, ending: Ending, worker: Worker) -> None:
        self._ending, self._worker = ending, worker
        self._answers: deque[HostCopy] = deque()

    def ask(self, sums: dict[str, Tensor]) -> None:
        """Add the request to the sums of a step, which are then exchanged."""
        if self._worker.workers > 1:
            wanted = float(self._worker.rank == 0 and self._ending.wanted)
            sums[_KEY] = torch.full((), wanted, device=self._worker.device, dtype=torch.float64)

    def reached(self, sums: dict[str, Tensor]) -> bool:
        """Whether to end after this step: the same on every worker. Takes the request from sums."""
        answer = sums.pop(_KEY, None)
        if answer is None:
            return self._ending.wanted
        self._answers.append(HostCopy(answer))
        if self._answers[-1].is_on_its_way and len(self._answers) <= LAG:
            return False
        return bool(self._answers.popleft().values().item())
