"""A run directory whatever happened to it: equal to a fresh run, and no finished unit ran twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from tests.command import EXAMPLES, forget, raypipe, table
from tests.scenario import cases

TABLES = ("evaluations", "values", "totals", "variants")
#: how a command ends in or after a unit, and its exit status; the process may just be gone
ENDS = {"interrupt": 130, "error": 1, "kill": None}
MOST = {"powers": 3, "runs": 3}


def rows_of(folder: str, name: str) -> list[list[Any]]:
    """The rows of a table, without those of its columns that differ from run to run."""
    own = ["run_id", "command_id", "duration_s", "worker"]
    rows = table(folder, name).drop(columns=own, errors="ignore")
    return sorted(map(list, rows.astype(str).to_numpy()))


def outcomes(folder: str) -> dict[str, list[Any]]:
    """What the ledger has of every unit that is asked for."""
    names = ("fingerprint", "status", "budget", "extents")
    units = Ledger(RunDirectory.at(folder), writable=False).items("units")
    return {key: [row.get(name) for name in names] for key, row in units}


class Resumed:
    """What is asked of a run directory in the current one, and the events that happen to it."""

    def __init__(self) -> None:
        self.asked = {"numbers": 2, "powers": 1, "runs": 1, "steps": 1}
        #: lines that a unit had finished with
        self.lost = 0

    def command(self, folder: str = "run", expected: int = 0) -> str:
        numbers, powers, runs, steps = self.asked.values()
        given = (f"calls.numbers={[*range(1, numbers + 1)]}", f"calls.steps={steps}")
        given += (f"matrix.calls.power={[*range(1, powers + 1)]}", f"matrix.runs={runs}")
        given += ("--shared",) * (numbers % 2)
        forget(Path.cwd())
        return raypipe("run", "c.yaml", *given, "--local", "--run-dir", folder, expected=expected)

    def run(self) -> None:
        self.command()
        assert "nothing to do" in self.command()
        numbers, powers, runs, steps = self.asked.values()
        assert len(rows_of("run", "totals")) == powers * runs
        assert len(rows_of("run", "values")) == powers * runs * numbers
        budgets = [row[2] for key, row in outcomes("run").items() if key.startswith("calls")]
        assert budgets == [steps] * powers * runs * numbers

    def end_early(self, kind: str, after: int) -> None:
        """Ask for more; the command ends after so many units."""
        self.more("numbers")
        Path("fault.txt").write_text(f"{after} {kind}")
        if (status := ENDS[kind]) is not None:
            self.command(expected=status)
        else:
            with pytest.raises(BaseException, match=r"^$"):
                self.command()

    def more(self, name: str) -> None:
        """Ask for one more, up to a limit."""
        self.asked[name] = min(self.asked[name] + 1, MOST.get(name, 99))

    def tear_the_last_line(self, part: float) -> None:
        (file,) = Path("run/ledger").glob("*.jsonl")
        *earlier, last = file.read_bytes().splitlines(keepends=True)
        if last.endswith(b"\n"):
            self.lost += len(json.loads(last)["keys"]) * (b'"table": "units"' in last)
            file.write_bytes(b"".join([*earlier, last[: int(len(last) * part)]]))

    def delete_a_table(self, name: str) -> None:
        shutil.rmtree(Path("run/results", name), ignore_errors=True)


CASES = cases(__file__, "resumed")


def assert_equals_a_fresh_run(events: list[list[Any]]) -> None:
    """A run directory after events equals one that is asked for everything at once."""
    with TemporaryDirectory() as folder, chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        shutil.copy(EXAMPLES / "example_resumed.py", "resumed.py")
        Path("c.yaml").write_text("experiment: resumed\n")
        resumed = Resumed()
        try:
            for name, *values in (["run"], *events, ["run"]):
                getattr(resumed, name)(*values)
                ran = Counter(Path("ran.txt").read_text().splitlines())
                assert sum(ran.values()) - len(ran) <= resumed.lost, ran
            Path("ran.txt").rename("ran-before.txt")
            resumed.command(folder="fresh")
            assert outcomes("run") == outcomes("fresh")
            for each in TABLES:
                assert rows_of("run", each) == rows_of("fresh", each)
        finally:
            forget(Path(folder))


def test_a_run_directory_goes_on_after_each_of_these_events() -> None:
    assert_equals_a_fresh_run(CASES["all"])


@pytest.mark.slow
@settings(max_examples=6, phases=(Phase.generate,))  # to make a failure smaller takes minutes
@given(st.lists(st.sampled_from(CASES["events"]), max_size=8))
def test_a_run_directory_equals_a_fresh_run_whatever_happened_to_it(events) -> None:
    assert_equals_a_fresh_run(events)
