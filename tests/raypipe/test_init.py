"""``raypipe init``: projects that run at once, and names that are refused."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raypipe.commands.init import init, listing
from raypipe.config import shipped
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import raypipe

WORKLOADS = ("pabbo_lda", "teleclass", "transformer", "lm_pretrain", "summarization")
SMALL = ("function", "training")


pytestmark = pytest.mark.usefixtures("folder")


def python(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_list_has_every_template() -> None:
    lines = dict(line.split(maxsplit=1) for line in listing().splitlines())
    assert set(lines) == {*SMALL, *WORKLOADS}
    folders = shipped.folder() / "experiments"
    assert {file.parent.name for file in folders.glob("*/experiment.py")} == set(WORKLOADS)


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
    steps = read_table(RunDirectory.at("mine/runs/first"), "steps")
    assert steps["eval_accuracy"].dropna().iloc[-1] > 0.7


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_code_of_a_workload_is_the_users_own(workload: str) -> None:
    init("mine", workload)
    for file in Path("mine").rglob("*.py"):
        text = file.read_text()
        assert re.search(r"\bexperiments\.[a-z]", text) is None, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mine"):
                base = Path("mine", *str(node.module).split("."))
                assert base.with_suffix(".py").is_file() or (base / "__init__.py").is_file(), base
    weights = {file.stem for file in Path("mine").rglob("*.safetensors")}
    assert ("train_small" in weights) == (workload == "pabbo_lda")
    documents = [yaml.safe_load(file.read_text()) for file in Path("mine").rglob("*.yaml")]
    assert documents
    assert {document["experiment"] for document in documents} == {"mine"}


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_test_of_a_workload_passes(workload: str) -> None:
    init("mine", workload)
    done = python("mine", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_overwritten() -> None:
    Path("mine").mkdir()
    (Path("mine") / "README.md").write_text("mine")
    assert "mine: is not empty" in raypipe("init", "mine", expected=2)
    assert [file.name for file in Path("mine").iterdir()] == ["README.md"]
    assert (Path("mine") / "README.md").read_text() == "mine"
    Path("file").touch()
    raypipe("init", "file", expected=2)
    Path("empty").mkdir()
    raypipe("init", "empty")


@pytest.mark.parametrize(
    ("name", "template", "message"),
    [
        ("mine", "transfomer", "did you mean transformer?"),
        ("torch", "transformer", "Python already has a module torch"),
        ("class", "transformer", "cannot name a Python package"),
        ("1st", "pabbo_lda", "cannot name a Python package"),
    ],
)
def test_names_that_cannot_work_are_refused(name: str, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init(name, template)
    assert not Path(name).exists()


def test_a_package_is_named_after_the_last_part_of_a_path() -> None:
    init("some/my-study", "transformer")
    assert Path("some/my-study/my_study/experiment.py").is_file()
    assert "cd some/other\n" in init("some/other", "function")
