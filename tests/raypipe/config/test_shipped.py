"""Names of shipped configurations, and where the modules of a configuration are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raypipe import import_path
from raypipe.commands import configuration as config
from raypipe.config import shipped
from raypipe.errors import ConfigError
from raypipe.graph.configuration import load_experiment
from tests.raypipe.toy import TOY

PROJECT = Path(__file__).resolve().parents[3]


pytestmark = pytest.mark.usefixtures("folder")


def test_names_are_those_of_the_files() -> None:
    assert shipped.folder() == PROJECT
    assert shipped.file_of("quickstart") == PROJECT / "configs/quickstart.yaml"
    assert shipped.file_of("sweeps/transformer") == PROJECT / "configs/sweeps/transformer.yaml"
    for name, file in shipped.configurations().items():
        assert shipped.file_of(name) == file
        assert shipped.headline(file).endswith((".", "?", ":", "machine."))


def test_a_file_of_the_current_directory_wins() -> None:
    Path("quickstart.yaml").touch()
    assert shipped.file_of("quickstart") == Path("quickstart.yaml")
    Path("quickstart").touch()
    assert shipped.file_of("quickstart") == Path("quickstart")


def test_a_name_is_said_to_be_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.read("transformer").experiment == "experiments.transformer"
    told = capsys.readouterr()
    assert told.err == f"configuration: {PROJECT}/configs/transformer.yaml, shipped with raypipe\n"
    assert told.out == ""


def test_modules_next_to_the_configuration_are_found_after_those_of_the_current_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "path" / "to"
    project.mkdir(parents=True)
    (tmp_path / "both.py").write_text(TOY.replace('"toy"', '"here"'))
    for name, found in (("beside", "toy"), ("both", "here")):
        (project / f"{name}.py").write_text(TOY)
        (project / "x.yaml").write_text(f"experiment: {name}\n")
        document = config.read("path/to/x.yaml")
        assert config.resolve(document, (), "cpu", []).experiment.name == found
    first = import_path.of_workers().split(os.pathsep)
    assert first[:2] == [str(tmp_path), str(project)]
    told = capsys.readouterr().err
    assert told == f"experiment: {tmp_path}/both.py, not {project}/both.py\n"


def test_workers_get_no_folder_of_python_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/some/where:/else")
    entries = import_path.of_workers().split(os.pathsep)
    assert entries[0] == str(Path.cwd())
    assert [entry for entry in entries if entry.endswith(("site-packages", ".zip"))] == []
    assert os.path.dirname(os.__file__) not in entries  # noqa: PTH120
    assert len(entries) == len(set(entries))
    assert entries[-2:] == ["/some/where", "/else"]


def test_a_shipped_experiment_without_its_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as it is in the wheel; an editable installation may be older than the project
    monkeypatch.setattr(shipped, "requires", lambda name: ["numba<1; extra == 'workloads'", "ray"])
    monkeypatch.setattr(shipped, "package_version", lambda name: None)
    lacking = r"need numba; pip install 'raypipe-runner\[workloads\]'"
    with pytest.raises(ConfigError, match=lacking):
        load_experiment("experiments.pabbo_lda", "a.yaml")
    Path("mine_alone.py").write_text(TOY)
    assert load_experiment("mine_alone", "a.yaml").name == "toy"
