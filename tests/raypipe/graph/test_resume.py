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
from tests.command import EXAMPLES, forget, raypipe

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
    """A run directory that is extended, interrupted and damaged."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self._patch = pytest.MonkeyPatch()
        self._patch.chdir(self._folder.name)
        self._patch.syspath_prepend(self._folder.name)
        shutil.copy(EXAMPLES / "example_resumed.py", "resumed.py")
        Path("c.yaml").write_text("experiment: resumed\n")
        self.numbers, self.powers, self.runs, self.steps = [1, 2], [1], 1, 1
        self.lost = 0

    def command(self, folder: str = "run", expected: int = 0) -> str:
        given = (f"calls.numbers={self.numbers}", f"calls.steps={self.steps}")
        given += (f"matrix.calls.power={self.powers}", f"matrix.runs={self.runs}")
        forget(Path.cwd())
        return raypipe("run", "c.yaml", *given, "--local", "--run-dir", folder, expected=expected)

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
            partial(machine.end_early, kind="error", after=0),
            machine.run,
            partial(machine.end_early, kind="interrupt", after=1),
            partial(machine.delete_a_table, name="totals"),
            partial(machine.end_early, kind="kill", after=1),
            partial(machine.tear_the_last_line, part=0.5),
            machine.add_power,
            machine.add_run,
        ):
            change()
            machine.no_finished_unit_ran_again()
    finally:
        machine.teardown()


@pytest.mark.slow
def test_a_run_directory_equals_a_fresh_run_whatever_happened_to_it() -> None:
    # to make a failure smaller would take minutes
    few = settings(max_examples=6, stateful_step_count=8, phases=(Phase.generate,))
    run_state_machine_as_test(Resumed, settings=few)
