"""Matrices, searches and races through the commands, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import raypipe
from tests.scenario import cases, play

REFUSED = [
    (study["file"], *pair) for study in cases(__file__, "refused") for pair in study["refused"]
]


@pytest.mark.parametrize(("file", "key", "message"), REFUSED, ids=[case[1] for case in REFUSED])
def test_an_impossible_study_is_one_message(hill, file, key, message):
    (hill / "hill.yaml").write_text(file)
    for command in ("run", "plan"):
        error = raypipe(command, "hill.yaml", "--matrix", key, expected=2)
        assert message in error
        assert error.count("\n") == 1, error
    assert not Path("runs").exists()


@pytest.mark.parametrize("case", cases(__file__, "hill"), ids=lambda case: case["name"])
def test_commands_on_studies(hill, case):
    play(case["commands"])
