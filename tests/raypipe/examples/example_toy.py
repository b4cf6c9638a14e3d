"""The smallest experiment; tests change its text."""

from pydantic import PositiveInt

from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage, Unit
from raypipe.graph.launcher import PoolOptions
from raypipe.graph.training_stage import hardware_stage
from raypipe.training.settings import TrainStageSettings


class Squares(Settings):
    numbers: tuple[int, ...] = (1, 2)
    power: PositiveInt = 2


class Toy(Settings):
    squares: Squares = Squares()
    train: TrainStageSettings = TrainStageSettings()


def stages(settings):
    s = settings.squares
    if 13 in s.numbers:
        raise ValueError("squares.numbers = 13: brings bad luck; leave it out")
    units = [Unit(f"squares/{n}") for n in s.numbers]

    def run(context):
        with context.pool(PoolOptions(0.5)) as pool:
            todo = {unit.key: unit for unit in context.todo()}
            for key in todo:
                pool.submit(key, pow, int(key.split("/")[1]), s.power)
            while ended := context.finished(pool):
                for result in ended:
                    row = {"dataset": result.key, "value": float(result.value)}
                    context.ledger.put("evaluations", {result.key: row})
                    context.finish(result.key)
                    print("computed", result.key)
                    if result.value == 7**s.power:
                        raise RuntimeError("seven is one too many")
                    if result.value == 8**s.power:
                        raise KeyboardInterrupt

    return [hardware_stage(), Stage("squares", run, units, ("hardware",), ("squares.power",))]


EXPERIMENT = Experiment("toy", 1, Toy, stages)
