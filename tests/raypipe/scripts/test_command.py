"""What a script receives: arguments, variables, folders."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import UnitError
from raypipe.scripts import command
from raypipe.scripts import run as run_module
from raypipe.scripts.command import ScriptStageSettings
from raypipe.scripts.experiment import ScriptTask, script_stage
from raypipe.scripts.run import Places
from raypipe.stats import finite_or_none
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_rows
from raypipe.training.batching import BatchPlan
from raypipe.training.ending import Ending
from raypipe.training.job import TrainingJob
from raypipe.training.settings import ScalingSettings, TrainingSettings
from tests.scenario import cases, named_cases


def settings(text: str, **more) -> ScriptStageSettings:
    return ScriptStageSettings(command=text, **more)


def job(run: RunDirectory, folder: Path, code: str, **more) -> TrainingJob:
    """A job of a script with this code."""
    (folder / "train.py").write_text(code)
    own = settings(f"{shlex.quote(sys.executable)} train.py {{steps}}", **more)
    own = own.model_copy(update={"training": TrainingSettings(steps=5)})
    task = ScriptTask(str(folder), {}, {}, frozenset({"steps"}), frozenset())
    return TrainingJob("t", "run", task, own, BatchPlan(1, 1, 1, 1), run)


VALUE = st.text(st.characters(exclude_characters="\0", codec="utf-8")) | st.sampled_from(
    ["", "a  b *", "$HOME `exit 3`", "'", '"; exit 3; "', "'; exit 3; '", "\\", "-n", "\n#"]
)


@given(VALUE)
def test_a_shell_has_values_as_arguments(text):
    own = settings("""sh -c 'printf "<%s>" "x$1" "$2"' _ {name} {resume}""")
    values = {"name": text, "threads": 1, **dict.fromkeys(command.PLACES, "a b")}
    environment = command.environment(values, uses_gpus=False)
    argv = command.arguments(own, {**values, "checkpoint_dir": "c"}, resumes=True)
    printed = subprocess.run(argv, env=environment, capture_output=True, check=True).stdout
    assert printed.decode() == f"<x{text}><--resume>"


def test_the_script_of_a_command(tmp_path):
    (tmp_path / "pack").mkdir()
    for name in ("program", "train.py", "pack/train.py"):
        (tmp_path / name).touch()
    for text, script in cases(__file__, "programs").items():
        assert command.script_of(text, tmp_path) == script


def test_several_workers_are_one_process_with_all_resources(folder):
    text = "torchrun --nproc-per-node {workers} train.py"
    scaling = ScalingSettings(workers=4, gpus_per_worker=1, cpus_per_worker=2)
    stage = script_stage("train", settings(text, scaling=scaling))
    assert stage.training is not None
    placed = stage.training.task(None).placed(stage.training.settings).scaling
    assert (placed.workers, placed.gpus_per_worker, placed.reserved_cpus) == (1, 4, 8)


def test_a_file_that_changed_since_the_start_is_refused(run, tmp_path):
    asked = job(run, tmp_path, "pass")
    asked = replace(asked, task=replace(asked.task, hashes={"train.py": "0" * 32}))
    with pytest.raises(ValueError, match=r"train\.py: .* has changed since"):
        asked.task.run(asked, print, Ending())
    asked = replace(asked, task=replace(asked.task, hashes={"data.py": "0" * 32}))
    with pytest.raises(ValueError, match=r"data\.py: .* is missing"):
        asked.task.run(asked, print, Ending())


def test_an_early_end_lets_the_script_save(run, tmp_path):
    code = (
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    pathlib.Path(os.environ['RAYPIPE_CHECKPOINT_DIR'], 'last').touch()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        'print(\'{"step": 3, "loss": 1}\', flush=True)\n'
        "time.sleep(600)\n"
    )
    asked, ending = job(run, tmp_path, code, metrics="stdout"), Ending()

    def report(row: object) -> None:
        ending.wanted = True

    outcome = asked.task.run(asked, report, ending)
    assert outcome["ended_at"] == 3
    (folder,) = run.list(run.checkpoints("t"))
    assert run.list(f"{run.checkpoints('t')}/{folder}") == ["last"]


def test_folders_of_a_remote_run_directory(remote, tmp_path, monkeypatch):
    asked = job(remote, tmp_path, "")
    with Places(asked) as first:
        (first.output / "deep").mkdir()
        (first.output / "deep/model").write_text("m")
        (first.checkpoints / "last").write_text("1")
        first.log.write_text("one\n")
    assert not first.output.exists()
    (kept,) = remote.list(remote.checkpoints("t"))
    last = f"{remote.checkpoints('t')}/{kept}/last"
    monkeypatch.setattr(run_module, "_COPY_S", -1.0)
    with Places(asked) as second:
        assert second.has_checkpoints
        assert (second.output / "deep/model").read_text() == "m"
        second.checkpoints.joinpath("last").write_text("22")
        second.keep()
        assert remote.read(last) == b"22"
        with second.log.open("a") as log:
            log.write("two\n")
    assert remote.read(remote.log("t")) == b"one\ntwo\n"


@pytest.mark.parametrize("case", named_cases(__file__, "metrics"))
def test_what_a_script_writes_becomes_rows(run, tmp_path, case):
    name, said = case["file"], []
    code = (
        "import os, sys\n"
        f"path = os.environ['RAYPIPE_OUTPUT_DIR'] + {f'/{name}'!r}\n"
        f"out = sys.stdout if {name!r} == 'stdout' else open(path, 'w')\n"
        "out.reconfigure(encoding='utf-8', newline='')\n"
        f"print({case['text']!r}, end='', file=out, flush=True)\n"
    )
    asked = job(run, tmp_path, code, metrics=name)
    if "failure" in case:
        with pytest.raises(UnitError, match=re.escape(case["failure"])):
            asked.task.run(asked, print, Ending())
        return
    last = asked.task.run(asked, said.append, Ending())
    warnings = [row for row in said if isinstance(row, str)]
    assert len(warnings) == ("warning" in case)
    assert all(text.startswith(f"WARNING: t: metrics = {name}: ") for text in warnings)
    assert case.get("warning", "") in "".join(warnings)
    rows = sorted(read_rows(run, "steps", "t"), key=lambda row: row["step"])
    for row, expected in zip(rows, case.get("steps", rows), strict=True):
        assert {key: row[key] for key in expected} == expected
    expected = case.get("trial", {})
    assert {key: finite_or_none(last[key]) for key in expected} == expected
