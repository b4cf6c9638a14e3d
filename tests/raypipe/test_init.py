"""``raypipe init``: projects that run at once, and names that are refused."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.commands.init import init
from tests.command import raypipe, table

SMALL = ("function", "training")


pytestmark = pytest.mark.usefixtures("folder")


def python(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_tests_of_the_small_templates_pass() -> None:
    for template in SMALL:
        init(template, template)
    done = python(".", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_printed_commands_of_the_training_work() -> None:
    printed = init("mine", "training").splitlines()
    first, *_ = printed[printed.index("cd mine") + 1 :]
    with contextlib.chdir("mine"):
        raypipe(*first.split()[1:], "train.training.steps=60")
    steps = table("mine/runs/first", "steps")
    assert steps["eval_accuracy"].dropna().iloc[-1] > 0.7


def test_nothing_is_overwritten() -> None:
    Path("mine").mkdir()
    (Path("mine") / "README.md").write_text("mine")
    assert "mine: is not an empty folder" in raypipe("init", "mine", expected=2)
    assert [file.name for file in Path("mine").iterdir()] == ["README.md"]
    assert (Path("mine") / "README.md").read_text() == "mine"
    Path("file").touch()
    raypipe("init", "file", expected=2)
    Path("empty").mkdir()
    raypipe("init", "empty")


def test_an_unknown_template_is_refused() -> None:
    shown = raypipe("init", "mine", "--template", "trainin", expected=2)
    assert "--template trainin: no such template; did you mean training?" in shown
    assert not Path("mine").exists()


def test_the_folder_may_be_a_path() -> None:
    assert "cd some/other\n" in init("some/other", "function")
    assert "# other" in Path("some/other/README.md").read_text()
