"""The files beside the code."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml

import raypipe
from raypipe.commands import cluster_files
from raypipe.commands import configuration as config
from raypipe.hardware import Gpu, Hardware

PROJECT = Path(__file__).resolve().parents[1]
METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
CPU = Hardware("a", 2, 2**34)
GPU = Hardware("b", 16, 2**37, (Gpu(0, "GPU-0", "card", 24 * 2**30, "8.6"),))


each_configuration = pytest.mark.parametrize(
    "path", sorted((PROJECT / "configs").rglob("*.yaml")), ids=lambda p: p.stem
)


@each_configuration
@pytest.mark.parametrize(("node", "profile"), [(CPU, "cpu"), (GPU, "gpu")])
def test_every_configuration_is_valid_on_every_kind_of_machine(path, node, profile, monkeypatch):
    monkeypatch.chdir(PROJECT)
    found = config.resolve(config.read(path), (), "auto", [node])
    assert found.profile.startswith(profile)
    again = config.parse(yaml.safe_dump(found.resolved()), "resolved")
    assert config.resolve(again, (), "auto", [CPU]).settings == found.settings


@each_configuration
def test_no_profile_takes_an_arithmetic_that_older_cards_lack(path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    document = config.read(path)
    for gb in (8, 11, 16, 24, 48):
        node = Hardware("c", 16, 2**37, (Gpu(0, "GPU-0", "card", gb * 10**9, "7.5"),))
        sections = [each for _, each in config.resolve(document, (), "auto", [node]).settings]
        sections += [own for each in sections if (own := getattr(each, "training", 0))]
        taken = {getattr(section, "precision", None) for section in sections}
        assert taken.isdisjoint({"tf32", "bf16"}), gb


def test_the_cluster_of_this_repository_is_that_of_any_project():
    stored = (PROJECT / "cluster.yaml").read_text()
    written = cluster_files.text_of("cluster.yaml", "aws", {}, PROJECT)
    assert stored == re.sub(r"(?<=--python )3\.\d+", "3.11", written)


def test_no_text_names_the_distribution_of_another_project():
    """``raypipe`` on PyPI belongs to another project; ours is ``raypipe-runner``."""
    wrong = re.compile(r"pip install\s+(?:-\S+\s+)*['\"]?raypipe(?![-_]runner\b)|\braypipe\[[a-z]")
    assert wrong.search("pip install 'raypipe[nlp]'")
    assert not wrong.search("pip install 'raypipe-runner[nlp]'; pip install -e .")
    texts = {name: (PROJECT / name).read_text("utf-8", errors="replace") for name in _tracked()}
    places = [name for name, text in texts.items() if wrong.search(text)]
    # these two look for the wrong name, or give it to a schema as an invalid value
    assert set(places) <= {"tests/test_project.py", "tests/clusters/test_manifests.py"}


def test_the_version_is_the_same_everywhere():
    try:
        installed = version(METADATA["name"])
    except PackageNotFoundError:
        pytest.skip("raypipe-runner is not installed")
    assert METADATA["version"] == installed == raypipe.__version__
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert str(citation["version"]) == installed
    assert f"\n## {installed}\n" in (PROJECT / "CHANGELOG.md").read_text()


def test_every_private_import_is_documented():
    page = (PROJECT / "docs/private_apis.md").read_text()
    private = re.compile(
        r"^from ((?:ray|torch|sklearn)(?:\.\w+)*) import (?:\(([^)]*)\)|([^#\n]*))", re.MULTILINE
    )
    found = []
    for name in _tracked():
        if name.endswith(".py") and name.startswith(("raypipe/", "experiments/")):
            for module, several, one in private.findall((PROJECT / name).read_text()):
                names = [each.split()[0] for each in (several or one).split(",") if each.strip()]
                found += [each for each in names if each.startswith("_") or "._" in module]
    assert found
    assert [name for name in found if name not in page] == []


def test_the_tests_that_the_page_on_private_names_gives_exist():
    named = set(re.findall(r"`(test_\w+)`", (PROJECT / "docs/private_apis.md").read_text()))
    tests = "".join(path.read_text() for path in (PROJECT / "tests").rglob("test_*.py"))
    assert len(named) > 5
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


def test_the_tests_of_the_oldest_dependencies_exist():
    named = re.findall(r"tests/[\w/.]+", (PROJECT / ".ci/minimal").read_text())
    assert [name for name in named if not (PROJECT / name).exists()] == []
    assert len(named) > 20


def _tracked():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name]
