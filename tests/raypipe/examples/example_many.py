"""As many units as are asked for."""

from raypipe.config.settings import Operational, Settings
from raypipe.graph.experiment import Experiment, Stage, Unit
from raypipe.graph.launcher import PoolOptions
from raypipe.graph.training_stage import hardware_stage


class Work(Settings):
    count: Operational[int] = 100


class Many(Settings):
    work: Work = Work()


def one(number):
    return number


def stages(settings):
    work = settings.work
    units = {f"units/{n}": Unit(f"units/{n}", {"n": n}) for n in range(work.count)}

    def run(context):
        calls = ((u.key, one, u.literals["n"]) for u in context.todo())
        with context.pool(PoolOptions(1.0)) as pool:
            for key, value in context.map(pool, calls):
                row = {"dataset": "many", "value": float(value)}
                context.finish(units[key], {"evaluations": {key: row}})

    return [hardware_stage(), Stage("units", run, list(units.values()), ("hardware",))]


EXPERIMENT = Experiment("many", 1, Many, stages)
