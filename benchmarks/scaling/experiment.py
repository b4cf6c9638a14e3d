"""Experiment with units that only sleep."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

from benchmarks.scaling.units import unit
from raypipe.config.settings import Operational, Settings
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Experiment, Stage, Unit
from raypipe.graph.launcher import PoolOptions


class Work(Settings):
    """Number and length of the units."""

    count: Operational[PositiveInt] = 1000
    seconds: NonNegativeFloat = 0.1


class Scale(Settings):
    """Configuration of the experiment."""

    work: Work = Work()


def stages(settings: Scale) -> list[Stage]:
    """Return the stage of the units."""
    work = settings.work
    units = [
        Unit(f"units/{number}", {"number": number, "seconds": work.seconds})
        for number in range(work.count)
    ]

    def run(context: StageContext) -> None:
        todo = {one.key: one for one in context.todo()}
        done = len(units) - len(todo)
        context.begin(len(units), done)
        with context.pool(PoolOptions(1.0)) as pool:
            for key, node in context.map(pool, [(key, unit, work.seconds) for key in todo]):
                context.finish(todo[key], {"evaluations": {key: {"node": node}}})
                done += 1
                context.advance(done)

    return [Stage("units", run, units, workload=f"{work.count} units")]


EXPERIMENT = Experiment("benchmarks.scaling.experiment", 1, Scale, stages)
