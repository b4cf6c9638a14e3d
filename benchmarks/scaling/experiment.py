"""Experiment with units that do almost nothing, and a summary of their values."""

from __future__ import annotations

from statistics import fmean

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from benchmarks.scaling.units import Kind, unit
from raypipe.config.settings import Operational, Settings
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Experiment, Stage, Unit
from raypipe.graph.launcher import PoolOptions


class Work(Settings):
    """Number and kind of the units."""

    count: Operational[PositiveInt] = 1000
    kind: Kind = "noop"
    seconds: NonNegativeFloat = 0.1
    cpus: Operational[PositiveFloat] = 1.0


class Scale(Settings):
    """Configuration of the experiment."""

    work: Work = Work()


def stages(settings: Scale) -> list[Stage]:
    """Return the stage of the units and the stage of their summary."""
    work = settings.work
    identity = {"kind": work.kind, "seconds": work.seconds}
    units = [
        Unit(f"units/{number}", {"number": number, **identity}) for number in range(work.count)
    ]
    summary = Unit("summary", {"count": work.count, **identity})

    def run(context: StageContext) -> None:
        todo = {one.key: one for one in context.todo()}
        done = len(units) - len(todo)
        context.begin(len(units), done)
        calls = ((key, unit, work.kind, work.seconds, int(key.partition("/")[2])) for key in todo)
        with context.pool(PoolOptions(work.cpus)) as pool:
            for key, (value, node) in context.map(pool, calls):
                row = {"dataset": work.kind, "seed": 0, "value": value, "node": node}
                context.finish(todo[key], {"evaluations": {key: row}})
                done += 1
                context.advance(done)

    def summarize(context: StageContext) -> None:
        values = [row["value"] for row in context.ledger.rows("evaluations")]
        row = {"units": len(values), "mean": fmean(values)}
        context.finish(summary, {"totals": {"all": row}})

    return [
        Stage("units", run, units, workload=f"{work.count} units"),
        Stage("summary", summarize, [summary], ("units",), always_rerun=True),
    ]


EXPERIMENT = Experiment("benchmarks.scaling.experiment", 1, Scale, stages)
