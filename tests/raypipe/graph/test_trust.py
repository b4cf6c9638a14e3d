"""Nothing stale is served, and every row says where it comes from: through the public command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.config.settings import Operational, Settings
from raypipe.graph.configuration import compose
from raypipe.graph.experiment import Experiment, Stage, Unit
from raypipe.graph.identity import view
from raypipe.graph.source import source_of
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.raypipe.toy import raypipe

CHANNELS = """
from raypipe.config.settings import Operational, Settings
from raypipe.graph.experiment import Experiment, Stage


class Model(Settings):
    channels: int = 16


class All(Settings):
    model: Model = Model()
    workers: Operational[int] = 1


def measure(context):
    value = float(context.settings.model.channels)
    context.ledger.put("measures", {"m": {"method": "m", "value": value}})


def stages(settings):
    return [Stage("measure", measure)]


EXPERIMENT = Experiment("channels", 1, All, stages)
"""


@pytest.fixture
def channels(work: Path) -> Path:
    (work / "channels.py").write_text(CHANNELS)
    (work / "channels.yaml").write_text("experiment: channels\n")
    yield work
    sys.modules.pop("channels", None)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    sys.modules.pop(file.stem, None)


def rows(work: Path, table: str) -> list[dict]:
    return read_table(RunDirectory.at(work / "run"), table).to_dict("records")


def run(work: Path, *arguments: str) -> int:
    sys.modules.pop("channels", None)
    sys.modules.pop("toy", None)
    return raypipe("run", *arguments, "--run-dir", str(work / "run"))


def test_a_raised_version_is_refused_with_both_versions(work, capsys):
    assert run(work, "toy.yaml") == 0
    edit(work / "toy.py", 'Experiment("toy", 1', 'Experiment("toy", 2')
    capsys.readouterr()
    assert run(work, "toy.yaml") == 2
    assert "version: stored 1, now 2" in capsys.readouterr().err


def test_a_key_that_nobody_declared_is_part_of_the_identity(channels, capsys):
    assert run(channels, "channels.yaml") == 0
    assert run(channels, "channels.yaml", "workers=4") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run(channels, "channels.yaml", "model.channels=64") == 2
    assert "model.channels: stored 16, now 64" in capsys.readouterr().err
    assert [row["value"] for row in rows(channels, "measures")] == [16.0]


def test_a_stage_has_only_the_settings_that_it_declares(channels, capsys):
    declared = 'Stage("measure", measure, reads=())'
    edit(channels / "channels.py", 'Stage("measure", measure)', declared)
    assert run(channels, "channels.yaml") == 1
    assert "stage 'measure' does not read model" in capsys.readouterr().out


def test_changed_source_is_named_and_strict_code_refuses_it(work, capsys):
    assert run(work, "toy.yaml") == 0
    assert run(work, "toy.yaml") == 0
    assert "WARNING" not in capsys.readouterr().out
    edit(work / "toy.py", '"value": float(result.value)', '"value": float(result.value) + 1')
    assert run(work, "toy.yaml", "squares.numbers=[1,2,3,4]") == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert "the code changed since results were stored: toy;" in warning
    assert "raise `version`" in warning
    assert sorted(row["value"] for row in rows(work, "evaluations")) == [1.0, 4.0, 9.0, 17.0]
    edit(work / "toy.py", "float(result.value) + 1", "float(result.value) + 2")
    assert run(work, "toy.yaml", "squares.numbers=[1,2,3,4,5]", "--strict-code") == 2
    assert "--strict-code: the code changed" in capsys.readouterr().err
    assert len(rows(work, "evaluations")) == 4


def test_source_is_of_the_experiment_and_what_it_imports_beside_it(tmp_path, monkeypatch):
    package = tmp_path / "traced" / "exp"
    package.mkdir(parents=True)
    (tmp_path / "traced" / "__init__.py").touch()
    (package / "__init__.py").write_text("from traced import shared\nimport json, torch\n")
    (package / "lonely.py").write_text("")
    (tmp_path / "traced" / "shared.py").write_text("import raypipe\n")
    (tmp_path / "traced" / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = ["traced", "traced.exp", "traced.exp.lonely", "traced.shared"]
    assert sorted(source_of("traced.exp").modules) == found


def test_each_command_has_its_environment_and_rows_refer_to_it(work):
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    (work / ".gitignore").write_text("run/\n__pycache__/\n")
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run([*git, *arguments], cwd=work, check=True)
    assert run(work, "toy.yaml") == 0
    (work / "toy.yaml").write_text("experiment: toy\nsquares: {numbers: [1, 2, 3, 4]}\n")
    assert run(work, "toy.yaml") == 0
    first, second = rows(work, "environment")
    assert first["command_id"] != second["command_id"]
    assert first["git_commit"] == second["git_commit"]
    assert (first["git_dirty"], second["git_dirty"]) == (False, True)
    assert first["command"].startswith("raypipe run toy.yaml --run-dir")
    assert all(row["numpy"] and row["torch"] and row["optuna"] for row in (first, second))
    commands = {row["dataset"]: row["command_id"] for row in rows(work, "evaluations")}
    assert commands["squares/1"] == first["command_id"]
    assert commands["squares/4"] == second["command_id"]


class Section(Settings):
    width: int = 3
    workers: Operational[int] = 1


class Sections(Settings):
    data: Section = Section()
    train: Section = Section()
    evaluate: Section = Section()


def composed(settings: Sections, version: int = 1, **options) -> dict[str, str]:
    """The fingerprint of each unit of three stages."""
    stages = [
        Stage("prepare", print, reads=("data.width",)),
        Stage("train", print, needs=("prepare",)),
        Stage("evaluate", print, [Unit("evaluate", options)], ("train",)),
    ]
    made = compose(Experiment("e", version, Sections, lambda s: stages), settings, stages)
    return {unit.key: unit.fingerprint for stage in made for unit in stage.units}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": Section(width=4)}, {"prepare", "train", "evaluate"}),
        ({"train": Section(width=4)}, {"train", "evaluate"}),
        ({"evaluate": Section(width=4)}, {"evaluate"}),
        ({"data": Section(workers=4), "train": Section(workers=2)}, set()),
    ],
)
def test_an_identity_changes_with_what_the_stage_and_its_needs_read(change, expected):
    before, after = composed(Sections()), composed(Sections(**change))
    assert {key for key in before if before[key] != after[key]} == expected


def test_a_view_has_the_declared_keys_alone():
    settings = view(Sections(), ("data.width", "train"), "train")
    assert settings.data.width == 3
    assert settings.train.workers == 1
    for read in (lambda: settings.data.workers, lambda: settings.evaluate):
        with pytest.raises(AttributeError, match="add it to `reads`"):
            read()
    with pytest.raises(AttributeError, match="immutable"):
        settings.data = 1
    with pytest.raises(ValueError, match=r"'data\.height', which is not a key"):
        view(Sections(), ("data.height",), "train")
