"""An experiment whose stages pass on files and rows, with a hill to find; tests change its text."""

import os
import signal
from pathlib import Path

from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage
from raypipe.store.tables import Column, Table


class Prepare(Settings):
    length: int = 3


class Fit(Settings):
    seed: int = 5
    rate: float = 1.0
    layers: int = 2
    steps: int = 10


class Judge(Settings):
    power: int = 1


class Hill(Settings):
    prepare: Prepare = Prepare()
    fit: Fit = Fit()
    judge: Judge = Judge()
    total: bool = False


def note(context):
    with Path("ran.txt").open("a") as stream:
        stream.write(context.stage.name + "\n")
    stop = Path("stop.txt")
    if stop.exists():
        left = int(stop.read_text()) - 1
        stop.write_text(str(left))
        if left == 0:
            stop.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if left == -100:
            stop.unlink()
            raise KeyboardInterrupt


def prepare(context):
    note(context)
    text = "x" * context.settings.prepare.length
    context.run_dir.write(context.run_dir.artifact("prepare", "text"), text.encode())


def fit(context):
    note(context)
    s = context.settings.fit
    if s.layers == 13:
        raise RuntimeError("bad luck")
    length = len(context.run_dir.read(context.run_dir.artifact("prepare", "text")))
    context.run_dir.write(context.run_dir.model("fit"), str(length).encode())
    value = (s.rate - 2.0) ** 2 + abs(s.layers - 3) + 10.0 / s.steps + 0.1 * (length - 3)
    value += 0.01 * (s.seed // 1000)
    context.ledger.put("measures", {"fit": {"method": "fit", "value": value, "size": s.layers}})


def judge(context):
    note(context)
    (row,) = [row for row in context.ledger.rows("measures") if row["method"] == "fit"]
    length = int(context.run_dir.read(context.run_dir.model("fit")))
    value = 2 * row["value"] + (context.settings.judge.power - 1) * length
    context.ledger.put("measures", {"judge": {"method": "judge", "value": value}})


def total(context):
    value = sum(row["value"] for row in context.ledger.rows("measures"))
    context.ledger.put("totals", {"total": {"value": value}})


def stages(settings):
    found = [
        Stage("prepare", prepare, reads=("prepare",)),
        Stage("fit", fit, needs=("prepare",), reads=("fit",)),
        Stage("judge", judge, needs=("fit",), reads=("judge",)),
    ]
    if settings.total:
        found.append(Stage("total", total, needs=("fit", "judge"), reads=(), always_rerun=True))
    return found


MEASURES = Table(
    "measures",
    "a method",
    (
        Column("method", "text", "The method."),
        Column("value", "real", "Its loss.", better="lower"),
        Column("size", "integer", "Its size."),
    ),
)
EXPERIMENT = Experiment("hill", 1, Hill, stages, tables=(MEASURES,))
