"""How the phases that scale become tasks."""

from __future__ import annotations

from experiments.teleclass.settings import StageSettings
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.launcher import PoolOptions


def pool_options(context: StageContext, settings: StageSettings, *, neural: bool) -> PoolOptions:
    """The pool of a phase; a neural model runs on a GPU where there is one."""
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
    """Blocks in runs of neighbours, a few for each worker: what a task works on."""
    size = max(1, blocks // max(1, int(4 * workers)))
    return [range(start, min(start + size, blocks)) for start in range(0, blocks, size)]
