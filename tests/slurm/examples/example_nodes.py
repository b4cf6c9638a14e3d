"""Tasks that say on which node of a SLURM job they ran."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import raypipe as rp


class TaskSettings(rp.Settings):
    units: rp.Operational[int] = 8
    seconds: rp.Operational[float] = 0.5
    gpus: rp.Operational[float] = 0
    #: this one raises
    broken: rp.Operational[int | None] = None
    #: from this one on they last for ever, unless the job was queued again
    held: rp.Operational[int | None] = None


class NodesSettings(rp.Settings):
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


def stages(settings: NodesSettings) -> Sequence[rp.Stage]:
    def run(context: rp.StageContext) -> None:
        units = {unit.key: unit for unit in context.todo()}
        with context.pool(rp.PoolOptions(gpus=settings.tasks.gpus)) as pool:
            calls = (
                (key, task, unit.literals["task"], settings.tasks) for key, unit in units.items()
            )
            for key, worker in context.map(pool, calls):
                row = {"dataset": key, "T": units[key].literals["task"], "worker": worker}
                context.ledger.put("evaluations", {f"{key}/{os.getpid()}": row})
                context.finish(units[key])
                context.say(f"{key} is done")

    units = [rp.Unit(f"tasks/{i}", {"task": i}) for i in range(settings.tasks.units)]
    return [rp.Stage("tasks", run, units)]


EXPERIMENT = rp.Experiment("nodes", 1, NodesSettings, stages)
