"""A run that several commands share: each unit once, and what one leaves that was killed."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import struct
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from raypipe.graph import runner
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage, Unit
from raypipe.launch.inline import InlineLauncher
from raypipe.store.shared_ledger import ShareOfRun
from tests.command import in_process, raypipe
from tests.raypipe.composed import composed, session_in
from tests.raypipe.graph.test_resume import rows_of
from tests.scenario import cases, write_files

RUN = ("run", "c.yaml", "--local", "--no-report", "--run-dir")


def flock_of_nfs(file: int, how: int) -> None:
    """Lock a file as NFS does: a share of it is kept while its holder waits for the whole."""
    # in the order of F_RDLCK, F_WRLCK and F_UNLCK
    kind = (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN).index(how & ~fcntl.LOCK_NB)
    command = fcntl.F_OFD_SETLK if how & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
    fcntl.fcntl(file, command, struct.pack("hhqqi4x", kind, 0, 0, 0, 0))


def member() -> None:
    os._exit(in_process(InlineLauncher(), *RUN, "shared", "--shared", environment={}).status)


@pytest.mark.parametrize("case", cases(__file__, "shared"), ids=lambda case: case["name"])
def test_each_unit_is_computed_once(folder, monkeypatch, case):
    monkeypatch.setattr(runner, "_POLL_S", 0.05)
    monkeypatch.setattr("raypipe.store.run_status._PERIOD_S", 0.01)
    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    write_files(folder, case["files"])
    members = [multiprocessing.get_context("fork").Process(target=member) for _ in range(3)]
    for each in members:
        each.start()
    assert sorted(each.join() or each.exitcode for each in members) == case["ended"]
    assert ("succeeded,", "failed,")[max(case["ended"])] in raypipe("show", "shared").split()
    ran = Path("ran.txt").read_text().splitlines()
    assert sorted(ran) == sorted([*{*ran}, *case["twice"]])
    raypipe(*RUN, "plain", expected=max(case["ended"]))
    for name in case["tables"]:
        assert rows_of("shared", name) == rows_of("plain", name)


def test_each_command_claims_its_share_of_what_is_left(tmp_path):
    session = session_in(tmp_path / "run")
    (stage,) = composed([Stage("s", print, [Unit(str(n), {"n": n}) for n in range(5)])])

    def claimed(context: StageContext, most: int) -> str:
        with context.session.shared.exclusively():
            context.claim(context.session.shared, most)
        return "".join(unit.key for unit in context.claimed)

    with ShareOfRun(session.run_dir, print) as one, ShareOfRun(session.run_dir, print) as another:
        ledgers = [share.ledger({}) for share in (one, another)]
        of_ledger = [replace(session, ledger=each, shared=each) for each in ledgers]
        first, second = (StageContext(stage, each) for each in of_ledger)
        assert (claimed(first, 10), claimed(second, 1)) == ("012", "3")
        assert (len(first.todo()), first.left) == (3, 5)
        first.finish("0")
        assert first.count(ledgers[0]) == second.count(ledgers[1]) == (1, 5)
        second.settle(ledgers[1])
        first.settle(ledgers[0], is_lost=True)
        assert (claimed(second, 10), claimed(first, 10)) == ("12", "4")
        assert first.elsewhere == "3: failed in another job of this run"


def test_more_units_are_claimed_at_a_time_while_that_is_faster(monkeypatch):
    """Also where they take seconds each."""
    part, clock = Mock(outdated=[]), Mock()
    monkeypatch.setattr(runner, "_Computation", lambda context: part)
    monkeypatch.setattr(runner, "time", clock)
    turns = runner._Turns(Mock(), Mock(), MagicMock())
    for part.units, took, pace in (("ab", 20, 4), ("abcd", 20, 8), ("abcdefgh", 36, 8)):
        clock.monotonic.side_effect = [0, took]
        turns._compute_claimed()
        assert turns._pace == pace
