"""Task pools of the phases, and the split of blocks into tasks."""

from __future__ import annotations

from experiments.teleclass.settings import StageSettings
from raypipe.graph.context import StageContext
from raypipe.graph.launcher import PoolOptions


def pool_options(context: StageContext, settings: StageSettings, *, neural: bool) -> PoolOptions:
    """Return the pool of a phase; a neural model runs on a GPU if there is one."""
    gpus = settings.gpus
    names = [gpu.name for node in context.session.nodes for gpu in node.gpus]
    if gpus is None:
        gpus = float(neural and bool(names))
    if gpus and names:
        context.device = names[0]
    return PoolOptions(
        cpus=settings.cpus,
        gpus=gpus,
        time_limit_s=settings.time_limit_s,
        keep_processes=True,
        most_tasks=settings.workers,
    )


def groups(blocks: int, workers: float) -> list[range]:
    """Return runs of adjacent blocks, a few per worker: one run per task."""
    size = max(1, blocks // max(1, int(4 * workers)))
    return [range(start, min(start + size, blocks)) for start in range(0, blocks, size)]
