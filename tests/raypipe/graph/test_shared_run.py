"""A run that several commands share: each unit once, and what one leaves that was killed."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from raypipe.graph import runner
from raypipe.launch.inline import InlineLauncher
from tests.command import in_process, raypipe
from tests.raypipe.graph.test_resume import rows_of
from tests.scenario import cases

RUN = ("run", "c.yaml", "--local", "--no-report", "--run-dir")


def member() -> None:
    os._exit(in_process(InlineLauncher(), *RUN, "shared", "--shared", environment={}).status)


@pytest.mark.parametrize("case", cases(__file__, "shared"), ids=lambda case: case["name"])
def test_each_unit_is_computed_once(folder, monkeypatch, case):
    monkeypatch.setattr(runner, "_POLL_S", 0.05)
    for name, text in case["files"].items():
        Path(name).write_text(text)
    members = [multiprocessing.get_context("fork").Process(target=member) for _ in range(3)]
    for each in members:
        each.start()
    ended = sorted(each.join() or each.exitcode for each in members)
    assert ended == case["ended"]
    ran = Counter(Path("ran.txt").read_text().splitlines())
    assert [line for line, times in ran.items() if times > 1] == case["twice"]
    raypipe(*RUN, "plain", expected=max(ended))
    for name in case["tables"]:
        assert rows_of("shared", name) == rows_of("plain", name)
