"""A run directory whatever happened to it: equal to a fresh run, and no finished unit ran twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import forget, raypipe
from tests.scenario import content, edit

#: each call has a number of steps, of which a larger budget adds further ones
MODULE = """
from pathlib import Path

import raypipe as rp


class Killed(BaseException):
    '''Nobody handles it, so that nothing is written any more.'''


FAULTS = {"interrupt": KeyboardInterrupt, "error": RuntimeError, "kill": Killed}


class Calls(rp.Settings):
    numbers: tuple[int, ...] = (1,)
    steps: int = 1
    power: int = 1
    scale: int = 1
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
        rows = {f"{unit.key}/{step}": {"unit": unit.key, "step": step, "value": s.scale * step}
                for step in range(done["steps"], unit.budget)}
        context.ledger.put("evaluations", rows)
        fail_at_last()
        with Path("ran.txt").open("a") as file:
            file.write(f"{context.stage.key} {unit.key} {unit.budget}\\n")
        value = s.scale * unit.literals["number"] ** s.power + s.seed
        row = {"unit": unit.key, "value": value, "steps": unit.budget}
        context.finish(unit, {"values": {unit.key: row}})
        fail_at_last()


def total(context):
    value = sum(row["value"] for row in context.ledger.rows("values"))
    context.ledger.put("totals", {"total": {"unit": "total", "value": value}})


def stages(settings):
    s = settings.calls
    units = [rp.Unit(f"calls/{n}", {"number": n}, budget=s.steps, budget_key="calls.steps")
             for n in s.numbers]
    reads = tuple(f"calls.{name}" for name in ("power", "scale", "seed"))
    return [rp.Stage("calls", call, units, reads=reads),
            rp.Stage("total", total, needs=("calls",), reads=(), always_rerun=True)]


COLUMNS = (rp.Column("unit", "text", "The unit."), rp.Column("value", "real", "Its value."))
EXPERIMENT = rp.Experiment("resumed", 1, Every, stages, tables=tuple(
    rp.Table(name, "a value", COLUMNS) for name in ("values", "totals")))
"""
TABLES = ("evaluations", "values", "totals", "variants")


def rows_of(folder: str, table: str) -> list[list[Any]]:
    """The rows of a table, without those of its columns that differ from run to run."""
    rows = read_table(RunDirectory.at(folder), table)
    rows = rows.drop(columns=["run_id", "command_id"], errors="ignore")
    return sorted(map(list, rows.astype(str).to_numpy()))


def outcomes(folder: str) -> dict[str, list[Any]]:
    """What the ledger has of every unit that is asked for."""
    names = ("fingerprint", "status", "budget", "extents")
    units = Ledger(RunDirectory.at(folder), writable=False).items("units")
    return {key: [row.get(name) for name in names] for key, row in units}


class Resumed(RuleBasedStateMachine):
    """A run directory that is extended, interrupted, damaged and asked for what it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self._patch = pytest.MonkeyPatch()
        self._patch.chdir(self._folder.name)
        self._patch.syspath_prepend(self._folder.name)
        Path("resumed.py").write_text(MODULE)
        Path("c.yaml").write_text("experiment: resumed\n")
        self.numbers, self.powers, self.runs, self.steps = [1, 2], [1], 1, 1
        self.lost = 0

    def command(self, *overrides: str, folder: str = "run", expected: int = 0) -> str:
        given = (f"calls.numbers={self.numbers}", f"calls.steps={self.steps}")
        given += (f"matrix.calls.power={self.powers}", f"matrix.runs={self.runs}", *overrides)
        forget(Path.cwd())
        return raypipe("run", "c.yaml", *given, "--local", "--run-dir", folder, expected=expected)

    def has_units(self) -> bool:
        return Path("ran.txt").exists() and bool(outcomes("run"))

    @initialize()
    def begin(self) -> None:
        self.run()

    @rule()
    def run(self) -> None:
        self.command()
        assert "nothing to do" in self.command()
        points = len(self.powers) * self.runs
        assert len(rows_of("run", "totals")) == points
        assert len(rows_of("run", "values")) == points * len(self.numbers)
        budgets = [row[2] for key, row in outcomes("run").items() if key.startswith("calls")]
        assert budgets == [self.steps] * points * len(self.numbers)

    @rule(kind=st.sampled_from(["interrupt", "error", "kill"]), after=st.integers(0, 1))
    def end_early(self, kind: str, after: int) -> None:
        """A command with more work ends in or after a unit; its process may just be gone."""
        self.add_number()
        Path("fault.txt").write_text(f"{after} {kind}")
        if kind == "kill":
            with pytest.raises(BaseException, match=r"^$"):
                self.command()
        else:
            self.command(expected={"interrupt": 130, "error": 1}[kind])

    @rule()
    def add_number(self) -> None:
        self.numbers.append(len(self.numbers) + 1)

    @precondition(lambda self: len(self.powers) < 3)
    @rule()
    def add_power(self) -> None:
        self.powers.append(len(self.powers) + 1)

    @precondition(lambda self: self.runs < 3)
    @rule()
    def add_run(self) -> None:
        self.runs += 1

    @rule()
    def add_step(self) -> None:
        self.steps += 1

    @precondition(has_units)
    @rule(data=st.data())
    def ask_for_other_results(self, data: st.DataObject) -> None:
        before = content("run")
        kind = data.draw(st.sampled_from(["value", "budget", "version", "keys"]))
        if kind == "value":
            shown = self.command("calls.scale=5", expected=2)
            assert "calls.scale: stored 1, now 5" in shown
        elif kind == "budget":
            assert "calls.steps: stored" in self.command("calls.steps=0", expected=2)
        elif kind == "version":
            edit("resumed.py", '"resumed", 1', '"resumed", 2')
            assert "version: stored 1, now 2" in self.command(expected=2)
            edit("resumed.py", '"resumed", 2', '"resumed", 1')
        else:
            shown = self.command("matrix.calls.power=null", expected=2)
            assert "matrix.keys: stored ['calls.power', 'seed'], now ['seed']" in shown
        assert content("run") == before

    @rule(part=st.floats(0, 1, exclude_max=True))
    def tear_the_last_line(self, part: float) -> None:
        (file,) = Path("run/ledger").glob("*.jsonl")
        *earlier, last = file.read_bytes().splitlines(keepends=True)
        if last.endswith(b"\n"):
            self.lost += json.loads(last)["table"] == "units"
            file.write_bytes(b"".join([*earlier, last[: int(len(last) * part)]]))

    @rule(name=st.sampled_from(["values", "totals", "stages"]))
    def delete_a_table(self, name: str) -> None:
        shutil.rmtree(Path("run/results", name), ignore_errors=True)

    @invariant()
    def no_finished_unit_ran_again(self) -> None:
        if Path("ran.txt").exists():
            ran = Counter(Path("ran.txt").read_text().splitlines())
            assert sum(ran.values()) - len(ran) <= self.lost, ran

    def teardown(self) -> None:
        try:
            self.run()
            Path("ran.txt").rename("ran-before.txt")
            self.command(folder="fresh")
            assert outcomes("run") == outcomes("fresh")
            for table in TABLES:
                assert rows_of("run", table) == rows_of("fresh", table)
        finally:
            forget(Path(self._folder.name))
            self._patch.undo()
            self._folder.cleanup()


def test_a_run_directory_goes_on_after_each_of_these_events() -> None:
    machine = Resumed()
    try:
        for change in (
            machine.begin,
            machine.add_step,
            machine.run,
            partial(machine.delete_a_table, name="values"),
            machine.run,
            partial(machine.end_early, kind="kill", after=1),
            partial(machine.tear_the_last_line, part=0.5),
            machine.add_power,
            machine.add_run,
        ):
            change()
            machine.no_finished_unit_ran_again()
    finally:
        machine.teardown()


def test_a_run_directory_equals_a_fresh_run_whatever_happened_to_it() -> None:
    # to make a failure smaller would take minutes
    few = settings(max_examples=6, stateful_step_count=8, phases=(Phase.generate,))
    run_state_machine_as_test(Resumed, settings=few)
