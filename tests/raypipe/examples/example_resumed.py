"""Calls of several steps, of which a larger budget adds further ones, and their sum."""

from pathlib import Path

import raypipe as rp


class Killed(BaseException):
    """Nobody handles it, so that nothing is written any more."""


FAULTS = {"interrupt": KeyboardInterrupt, "error": RuntimeError, "kill": Killed}


class Calls(rp.Settings):
    numbers: tuple[int, ...] = (1,)
    steps: int = 1
    power: int = 1
    seed: int = 0


class Every(rp.Settings):
    calls: Calls = Calls()


def fail_at_last():
    file = Path("fault.txt")
    if file.exists():
        left, kind = file.read_text().split()
        file.write_text(f"{int(left) - 1} {kind}")
        if left == "0":
            file.unlink()
            raise FAULTS[kind]


def call(context):
    s = context.settings.calls
    for unit in context.todo():
        done = context.ledger.get("values", unit.key) or {"steps": 0}
        rows = {
            f"{unit.key}/{step}": {"unit": unit.key, "step": step, "value": step}
            for step in range(done["steps"], unit.budget)
        }
        context.ledger.put("evaluations", rows)
        fail_at_last()
        with Path("ran.txt").open("a") as file:
            file.write(f"{context.stage.key} {unit.key} {unit.budget}\n")
        value = unit.literals["number"] ** s.power + s.seed
        row = {"unit": unit.key, "value": value, "steps": unit.budget}
        context.finish(unit, {"values": {unit.key: row}})
        fail_at_last()


def total(context):
    value = sum(row["value"] for row in context.ledger.rows("values"))
    context.ledger.put("totals", {"total": {"unit": "total", "value": value}})


def stages(settings):
    s = settings.calls
    units = [
        rp.Unit(f"calls/{n}", {"number": n}, budget=s.steps, budget_key="calls.steps")
        for n in s.numbers
    ]
    reads = tuple(f"calls.{name}" for name in ("power", "seed"))
    return [
        rp.Stage("calls", call, units, reads=reads),
        rp.Stage("total", total, needs=("calls",), reads=(), always_rerun=True),
    ]


COLUMNS = (rp.Column("unit", "text", "The unit."), rp.Column("value", "real", "Its value."))
EXPERIMENT = rp.Experiment(
    "resumed",
    1,
    Every,
    stages,
    tables=tuple(rp.Table(name, "a value", COLUMNS) for name in ("values", "totals")),
)
