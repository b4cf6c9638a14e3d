"""The wheel and the source distribution, as a user installs them: no clone, no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.clusters.main_job import CONFIG
from tests.command import table
from tests.scenario import cases, write_files

pytest.importorskip("hatchling")
PROJECT = Path(__file__).resolve().parents[1]


def build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(iter(target.iterdir()))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", PROJECT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    place = ["--python", str(folder / "bin/python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *place, str(wheel)], check=True)
    # without the .pth files in them, which would add the repository
    below = [entry for entry in sys.path if entry.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(below))
    return folder / "bin"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run(folder: Path, *words: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """A program in a folder, with nothing of the repository on the search path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RAY"))}
    environment |= {"RAYPIPE_CACHE": str(folder.parent / "cache")}
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_the_wheel_is_one_package_with_all_that_is_shipped(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"raypipe"}
    assert [name for name in names if "__pycache__" in name] == []
    for folder, suffix, target in (
        ("experiments", ".py", "raypipe/shipped"),
        ("experiments", ".safetensors", "raypipe/shipped"),
        ("configs", ".yaml", "raypipe/shipped"),
        ("raypipe/commands/templates", "", "."),
    ):
        files = [f for f in (PROJECT / folder).rglob(f"*{suffix}") if "__pycache__" not in f.parts]
        wanted = {(Path(target) / f.relative_to(PROJECT)).as_posix() for f in files if f.is_file()}
        assert wanted
        assert wanted - names == set()


def test_only_imports_differ_from_the_repository(wheel: Path) -> None:
    """Also their number of lines is the same, so tracebacks lead to the same ones."""
    archive = zipfile.ZipFile(wheel)
    prefix = "raypipe/shipped/experiments/"
    files = [n for n in archive.namelist() if n.startswith(prefix) and n.endswith(".py")]
    assert len(files) > 80
    outside = re.compile(r"^\s*(from|import)\b.*(?<!shipped\.)\bexperiments\b", re.MULTILINE)
    for name in files:
        text = archive.read(name).decode()
        original = (PROJECT / name.removeprefix("raypipe/shipped/")).read_text()
        assert text.replace("raypipe.shipped.experiments", "experiments") == original
        assert not outside.search(text), name


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", PROJECT, tmp_path / "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build("wheel", source, tmp_path / "again")
    ours, theirs = (zipfile.ZipFile(path) for path in (wheel, again))
    assert sorted(ours.namelist()) == sorted(theirs.namelist())
    for name in ours.namelist():
        if ".dist-info/" not in name:
            assert ours.read(name) == theirs.read(name), name


@pytest.mark.slow
def test_names_work_in_an_empty_folder(installed: Path, empty: Path) -> None:
    listed = run(empty, installed / "raypipe", "run", "--list").stdout
    names = [line.split()[0] for line in listed.splitlines()]
    configs = PROJECT / "configs"
    files = [file.relative_to(configs).with_suffix("") for file in configs.rglob("*.yaml")]
    assert sorted(names) == sorted(map(str, files))
    planned = run(empty, installed / "raypipe", "plan", "quickstart")
    assert "train_small" in planned.stdout
    assert "shipped with raypipe" in planned.stderr
    wrong = run(empty, installed / "raypipe", "plan", "quikstart", status=2)
    assert "did you mean quickstart?" in wrong.stderr
    assert list(empty.iterdir()) == []


@pytest.mark.slow
def test_own_experiments_and_shipped_ones_can_be_used_side_by_side(installed, empty):
    own = empty / "experiments" / "mine"
    write_files(empty, cases(__file__, "wheel"))
    assert "shown: 3" in run(empty, installed / "raypipe", "config", "mine").stdout
    shipped = run(empty, installed / "raypipe", "config", "transformer")
    assert "experiment: experiments.transformer\n" in shipped.stdout
    assert "experiment:" not in shipped.stderr
    shutil.copytree(own, own.parent / "transformer")
    # whose keys are unknown
    copied = run(empty, installed / "raypipe", "config", "transformer", status=2)
    assert f"experiment: {own.parent / 'transformer' / '__init__.py'}, not " in copied.stderr


@pytest.mark.slow
def test_source_and_identities_do_not_depend_on_the_installation(
    installed, empty, monkeypatch, capsys
):
    """Also where a setting names a function of the experiment, by its name in the repository."""
    code = (
        "import json\n"
        "from raypipe.commands.configuration import read, resolve\n"
        "from raypipe.hardware import Hardware\n"
        "found = resolve(read('teleclass'), (), 'cpu', [Hardware('a', 2, 2**34)])\n"
        "print(found.source().fingerprint, json.dumps(found.settings.identity()))\n"
    )
    done = run(empty, installed / "python", "-c", code)
    monkeypatch.chdir(PROJECT)
    exec(code, {})
    assert done.stdout == capsys.readouterr().out
    assert "experiments.teleclass.generators:from_keywords" in done.stdout
    loaded = (
        "from raypipe.shipped.experiments.teleclass import generators\n"
        "named = generators.load_generator('experiments.teleclass.generators:from_keywords')\n"
        "assert named is generators.from_keywords\n"
    )
    run(empty, installed / "python", "-c", loaded)


@pytest.mark.slow
def test_the_main_job_runs_in_an_empty_folder_and_its_report_elsewhere(installed, empty, tmp_path):
    (empty / "tiny.yaml").write_text(CONFIG)  # `experiments.pabbo_lda`, as in the repository
    out = tmp_path / "out"
    run(empty, installed / "raypipe", "run", "tiny.yaml", "--run-dir", out)
    stages = table(out, "stages")
    assert set(stages["status"]) == {"succeeded"}
    assert len(stages) == 7
    (out / "report" / "index.html").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(elsewhere, installed / "raypipe", "report", out)
    assert "perplexity" in (out / "report" / "index.html").read_text()
    repeated = run(elsewhere, installed / "raypipe", "run", out / "config.yaml", "--run-dir", out)
    assert "nothing to do" in repeated.stdout
