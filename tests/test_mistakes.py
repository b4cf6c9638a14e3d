"""Typical mistakes of newcomers: each ends in one message that says what is wrong and what to do.

``mistakes.yaml`` has what was typed, and the words that the message must have. A mistake in the
command or the configuration has exit status 2 and leaves nothing behind. One that only the running
code can show has exit status 1, keeps what is finished, and is a row in ``failures``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from raypipe.launch.inline import InlineLauncher
from tests import command
from tests.scenario import cases, write_files

TABLE = cases(__file__, "mistakes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write_files(folder, TABLE["files"])
    return folder


@pytest.fixture(autouse=True)
def _here(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    yield
    command.forget(folder)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def ended(words: str) -> command.Ended:
    given = re.findall(r"(?:\[.*?\]|\{.*?\}|\S)+", words)
    return command.in_process(InlineLauncher(), *given, environment={})


@pytest.mark.parametrize("mistake", TABLE["mistakes"], ids=lambda row: ascii(row[0]))
def test_a_mistake_ends_in_one_message_and_leaves_nothing(mistake, folder):
    words, *says = mistake
    before = files(folder)
    found = ended(words)
    assert found.status == 2, found.output
    assert [text for text in says if text not in found.output] == [], found.output
    assert "Traceback" not in found.output
    assert len(found.output.strip().splitlines()) <= 6, found.output
    assert files(folder) == before


@pytest.mark.parametrize("failure", TABLE["failures"], ids=lambda row: row[0])
def test_a_call_that_fails_ends_in_one_message_and_continues(failure):
    words, *says = failure
    found = ended(words)
    assert found.status == 1, found.output
    assert [text for text in says if text not in found.output] == [], found.output
    assert "continue with: raypipe map" in found.output
