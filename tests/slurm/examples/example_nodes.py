"""Tasks that say on which node of a SLURM job they ran."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from raypipe.config.settings import Operational, Settings
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Experiment, Stage, Unit
from raypipe.graph.launcher import PoolOptions


class TaskSettings(Settings):
    units: Operational[int] = 8
    seconds: Operational[float] = 0.5
    gpus: Operational[float] = 0
    #: this one raises
    broken: Operational[int | None] = None
    #: from this one on they last for ever, unless the job was queued again
    held: Operational[int | None] = None


class NodesSettings(Settings):
    tasks: TaskSettings = TaskSettings()


def task(number: int, settings: TaskSettings) -> str:
    """The node, the GPUs that can be seen there, and the interface of torch's gloo."""
    if number == settings.broken:
        raise ValueError("broken on purpose")
    first = "SLURM_RESTART_COUNT" not in os.environ
    time.sleep(1e6 if first and settings.held is not None and number >= settings.held else 0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise RuntimeError("Ray cannot cancel what ignores SIGINT")
    time.sleep(settings.seconds)
    names = ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
    return " ".join(str(os.environ.get(name)) for name in names)


def stages(settings: NodesSettings) -> Sequence[Stage]:
    def run(context: StageContext) -> None:
        units = {unit.key: unit for unit in context.todo()}
        with context.pool(PoolOptions(gpus=settings.tasks.gpus)) as pool:
            calls = [
                (key, task, unit.literals["task"], settings.tasks) for key, unit in units.items()
            ]
            for key, worker in context.map(pool, calls):
                row = {"dataset": key, "T": units[key].literals["task"], "worker": worker}
                context.ledger.put("evaluations", {f"{key}/{os.getpid()}": row})
                context.finish(units[key])
                context.say(f"{key} is done")

    units = [Unit(f"tasks/{i}", {"task": i}) for i in range(settings.tasks.units)]
    return [Stage("tasks", run, units)]


EXPERIMENT = Experiment("nodes", 1, NodesSettings, stages)
