"""Batch sizes: effective batch = micro-batch x accumulation x workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raypipe.errors import ConfigError

KEYS = ("micro_batch", "accumulation", "effective_batch")
# where one level gives more than fits, what the result depends on stays
_PRECEDENCE = ("effective_batch", "micro_batch", "accumulation")


@dataclass(frozen=True)
class BatchPlan:
    """How a step's samples are spread over forwards and workers."""

    micro_batch: int
    accumulation: int
    effective_batch: int
    workers: int

    def halved(self) -> BatchPlan | None:
        """The same effective batch with the next lower divisor as micro-batch; None at 1."""
        if self.micro_batch == 1:
            return None
        product = self.micro_batch * self.accumulation
        micro = max(size for size in range(1, self.micro_batch // 2 + 1) if product % size == 0)
        return replace(self, micro_batch=micro, accumulation=-(-self.largest_share // micro))

    def for_workers(self, workers: int) -> BatchPlan:
        """The same effective batch on another number of workers, by the accumulation.

        Raises:
            ValueError: more workers than samples a step.

        """
        if workers > self.effective_batch:
            raise ValueError(
                f"{workers} workers for training.effective_batch = {self.effective_batch}: "
                "each takes a sample of a step at least; lower scaling.workers"
            )
        most = -(-self.effective_batch // workers)
        micro = min(self.micro_batch, most)
        return BatchPlan(micro, -(-most // micro), self.effective_batch, workers)

    @property
    def largest_share(self) -> int:
        """The most samples a worker takes in a step."""
        return -(-self.effective_batch // self.workers)


class BatchConflict(ConfigError):  # noqa: N818 - it is one, and the name says so
    """Sizes of one level that no plan has; ``level`` is its index."""

    def __init__(self, level: int, message: str) -> None:
        super().__init__(message)
        self.level = level


def resolve(levels: Sequence[Mapping[str, int]], workers: int, workers_level: int = 0) -> BatchPlan:
    """The plan from what each level of the configuration gives, the highest level first.

    Any two of the three sizes give the third. Where levels disagree the higher one wins and
    the conflicting lower value is dropped; values of one level that contradict each other are
    an error. A worker whose share the micro-batch does not divide has a shorter last one.

    Args:
        levels: the sizes given at each level.
        workers: the number of workers.
        workers_level: the index of the level that gives it.

    Raises:
        BatchConflict: a contradiction inside a level, or fewer samples a step than workers.

    """
    known: dict[str, int] = {}
    for index, level in enumerate(levels):
        if workers_level >= index and not _consistent(level, workers):
            given = ", ".join(f"{name} {level[name]}" for name in KEYS if name in level)
            raise BatchConflict(
                index,
                f"{given} with {workers} worker(s) contradict each other: effective_batch = "
                "micro_batch x accumulation x workers; give any two of the three",
            )
        for key in _PRECEDENCE:
            if (
                key in level
                and key not in known
                and _consistent({**known, key: level[key]}, workers)
            ):
                known[key] = level[key]
    return _complete(known, workers)


def _consistent(sizes: Mapping[str, int], workers: int) -> bool:
    """Whether some plan has these sizes; each worker takes a sample of a step at least."""
    if "effective_batch" not in sizes:
        return True
    effective = sizes["effective_batch"]
    if effective < workers:
        return False
    most = -(-effective // workers)
    micro, accumulation = sizes.get("micro_batch"), sizes.get("accumulation")
    if micro is not None and accumulation is not None:
        return micro <= most and accumulation == -(-most // micro)
    return (micro or accumulation or 1) <= most


def _complete(sizes: Mapping[str, int], workers: int) -> BatchPlan:
    micro, accumulation = sizes.get("micro_batch"), sizes.get("accumulation")
    effective = sizes.get("effective_batch")
    if effective is None:
        micro, accumulation = micro or 1, accumulation or 1
        return BatchPlan(micro, accumulation, micro * accumulation * workers, workers)
    most = -(-effective // workers)
    if micro is None:
        micro = -(-most // (accumulation or 1))
    return BatchPlan(micro, -(-most // micro), effective, workers)


def share(samples: int, workers: int, rank: int) -> range:
    """The positions of a step's samples that a worker takes: shares differ by one at most."""
    size, larger = divmod(samples, workers)
    first = rank * size + min(rank, larger)
    return range(first, first + size + (rank < larger))


def micro_batches(samples: int, workers: int, rank: int, micro_batch: int) -> list[range]:
    """A worker's positions of a step, cut into runs of at most ``micro_batch``, of even lengths.

    Every worker has as many runs, since with FSDP all take part in each forward. The last one of
    a smaller share is empty where runs are of one sample.
    """
    mine = share(samples, workers, rank)
    largest = -(-samples // workers)
    runs = -(-largest // micro_batch)
    cuts = [share(len(mine), runs, number) for number in range(runs)]
    return [mine[cut.start : cut.stop] for cut in cuts]
