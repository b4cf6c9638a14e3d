"""Asynchronous successive halving: which point goes on to the next rung.

The rule is Algorithm 2 of Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning":
whenever there is room, take the best ``1 / reduction_factor`` of the points that a rung has
measured so far, and promote one that was not promoted; higher rungs come first. No point waits for
a rung to be complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def promotable(
    rungs: Sequence[Mapping[int, float]],
    promoted: Collection[tuple[int, int]],
    reduction_factor: float,
) -> tuple[int, int] | None:
    """Return a point and the rung that it goes on to; None if none can be promoted.

    Args:
        rungs: the costs of the points measured in each rung, by their numbers; the lowest first.
        promoted: the points that a rung has received, as (number, rung).
        reduction_factor: one of this number of points goes on.

    """
    for rung in reversed(range(len(rungs) - 1)):
        costs = rungs[rung]
        best = sorted(costs, key=lambda number: (costs[number], number))
        for number in best[: int(len(costs) / reduction_factor)]:
            if (number, rung + 1) not in promoted:
                return number, rung + 1
    return None


def most_per_rung(trials: int, rungs: int, reduction_factor: float) -> list[int]:
    """Return the number of points that each rung gets at most if no point is misjudged."""
    counts = [trials]
    for _ in range(rungs - 1):
        counts.append(int(counts[-1] / reduction_factor))
    return counts
