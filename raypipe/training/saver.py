"""Checkpoints that are written while the training goes on, and the one that it starts from."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from raypipe.training import parallel
from raypipe.training.checkpoint import Checkpoint, CheckpointPart, CheckpointStore, Trace
from raypipe.training.job import TrainingJob
from raypipe.training.parallel import Worker
from raypipe.training.recovery import lost_state

log = logging.getLogger(__name__)


class Saver:
    """Thread that writes checkpoints, one at a time: of rank 0, or of every worker its part.

    An error of the thread is raised by the next call.
    """

    def __init__(self, worker: Worker, *, sharded: bool) -> None:
        self._ended = threading.Event()
        self._part: CheckpointPart | None = None
        if sharded:
            attempt = parallel.from_rank_0(secrets.token_hex(4), worker)
            self._part = CheckpointPart(worker.rank, worker.workers, attempt, self._ended.is_set)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._longest_s = 0.0

    def save(self, store: CheckpointStore, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, or this worker's part, whose tensors must not change any more."""
        self.start(store.save, checkpoint, self._part)

    def start(self, write: Callable[..., None], *contents: Any) -> None:
        """Wait for the last one, and call ``write(*contents)``; the contents must not change."""
        self.wait()
        self._writing = self._threads.submit(self._write, write, *contents)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def expected_s(self, copying_s: float) -> float:
        """Return how long a checkpoint takes whose copying takes this long; 0 if unknown."""
        return self._longest_s and copying_s + self._longest_s

    def close(self) -> None:
        """End the thread after the last checkpoint; its error is only logged."""
        self._ended.set()
        try:
            self.wait()
        except Exception:  # the training ends by another error
            log.exception("a checkpoint could not be written")
        self._threads.shutdown()

    def _write(self, write: Callable[..., None], *contents: Any) -> None:
        begun = time.monotonic()
        write(*contents)
        self._longest_s = max(self._longest_s, time.monotonic() - begun)


def newest(
    job: TrainingJob, store: CheckpointStore, trace: Trace, warn: Callable[[str], None]
) -> Checkpoint | None:
    """Return the checkpoint from which a job starts; None without one.

    Raises:
        ValueError: it cannot start without one.

    """
    checkpoint = store.newest(warn, trace)
    if checkpoint is None and job.continues:
        raise ValueError(lost_state(job))
    return checkpoint
