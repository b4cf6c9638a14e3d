"""Batch sizes: effective batch = micro-batch x accumulation x workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raypipe.errors import ConfigError

KEYS = ("micro_batch", "accumulation", "effective_batch")
#: samples per step if neither micro_batch nor effective_batch is given, as in Keras, and in Bengio,
#: Practical recommendations for gradient-based training of deep architectures (2012)
DEFAULT_EFFECTIVE_BATCH = 32
# if a level gives conflicting sizes, keep those that the result depends on
_PRECEDENCE = ("effective_batch", "micro_batch", "accumulation")


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


@dataclass(frozen=True)
class BatchPlan:
    """Split of a step's samples into micro-batches and workers."""

    micro_batch: int
    accumulation: int
    effective_batch: int
    workers: int

    def halved(self) -> BatchPlan | None:
        """Return the plan with the next smaller micro-batch and the same effective batch.

        The micro-batch becomes the next lower divisor, at most half. None at 1.
        """
        product = self.micro_batch * self.accumulation
        sizes = range(self.micro_batch // 2, 0, -1)
        micro = next((size for size in sizes if product % size == 0), None)
        if micro is None:
            return None
        largest_share = ceil_div(self.effective_batch, self.workers)
        return replace(self, micro_batch=micro, accumulation=ceil_div(largest_share, micro))

    def for_workers(self, workers: int) -> BatchPlan:
        """Return the plan with the same effective batch for another number of workers.

        The accumulation steps make up for the difference.
        """
        most = ceil_div(self.effective_batch, workers)
        micro = min(self.micro_batch, most)
        return BatchPlan(micro, ceil_div(most, micro), self.effective_batch, workers)


class BatchConflict(ConfigError):  # noqa: N818 - the name says that it is an error
    """Contradictory batch sizes within one configuration level; ``level`` is its index."""

    def __init__(self, level: int, message: str) -> None:
        super().__init__(message)
        self.level = level


def resolve(levels: Sequence[Mapping[str, int]], workers: int, workers_level: int = 0) -> BatchPlan:
    """Return the batch plan from the sizes of each configuration level, highest level first.

    Any two of the three sizes determine the third. A micro-batch alone takes one accumulation
    step; without micro-batch and effective batch, a step has 32 samples. If levels disagree, the
    higher one wins and the conflicting lower value is dropped. Contradictory values within one
    level are an error. If the micro-batch does not divide a worker's share, some of its
    micro-batches are shorter.

    Args:
        levels: the sizes given at each level.
        workers: the number of workers.
        workers_level: the index of the level that sets ``workers``.

    Raises:
        BatchConflict: a level contradicts itself, or has fewer samples per step than workers.

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
        for key in [name for name in _PRECEDENCE if name in level]:
            sizes = {key: level[key], **known}
            if _consistent(sizes, workers):
                known = sizes
    return _complete(known, workers)


def _consistent(sizes: Mapping[str, int], workers: int) -> bool:
    """Whether a plan with these sizes exists; each worker takes at least one sample per step."""
    if "effective_batch" not in sizes:
        return True
    effective = sizes["effective_batch"]
    if effective < workers:
        return False
    most = ceil_div(effective, workers)
    micro, accumulation = sizes.get("micro_batch"), sizes.get("accumulation")
    if micro is not None and accumulation is not None:
        return micro <= most and accumulation == ceil_div(most, micro)
    return (micro or accumulation or 1) <= most


def _complete(sizes: Mapping[str, int], workers: int) -> BatchPlan:
    micro, accumulation = sizes.get("micro_batch"), sizes.get("accumulation")
    effective = sizes.get("effective_batch")
    if effective is None and micro is not None:
        accumulation = accumulation or 1
        return BatchPlan(micro, accumulation, micro * accumulation * workers, workers)
    if effective is None:
        effective = max(DEFAULT_EFFECTIVE_BATCH, (accumulation or 1) * workers)
    most = ceil_div(effective, workers)
    if micro is None:
        micro = ceil_div(most, accumulation or 1)
    return BatchPlan(micro, ceil_div(most, micro), effective, workers)


def share(samples: int, workers: int, rank: int) -> range:
    """Return the positions of a worker's samples within a step; shares differ by at most one."""
    size, larger = divmod(samples, workers)
    first = rank * size + min(rank, larger)
    return range(first, first + size + (rank < larger))


def micro_batches(samples: int, workers: int, rank: int, micro_batch: int) -> list[range]:
    """Return a worker's positions in a step as micro-batches of at most ``micro_batch`` samples.

    Their lengths differ by at most one. Every worker has the same number of micro-batches, since
    with FSDP all workers take part in each forward pass. At a micro-batch of 1, the last
    micro-batch of a smaller share is empty.
    """
    mine = share(samples, workers, rank)
    runs = ceil_div(ceil_div(samples, workers), micro_batch)
    cuts = [share(len(mine), runs, number) for number in range(runs)]
    return [mine[cut.start : cut.stop] for cut in cuts]
