"""Nothing stale is served, and every row says where it comes from."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe import provenance
from raypipe.graph.identity import SettingsView, canonical_json, differences, fingerprint
from raypipe.graph.source import source_of
from tests.command import raypipe, table
from tests.raypipe.examples.example_sweep import SweptSettings

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(), plain, max_size=6))
def test_a_value_can_be_read_back_whatever_the_order_of_its_keys(value: dict[str, Any]) -> None:
    form = canonical_json(value)
    # as text: 1, 1.0 and true are told apart
    assert json.dumps(json.loads(form), sort_keys=True) == json.dumps(value, sort_keys=True)
    assert canonical_json(dict(reversed(value.items()))) == form


def test_a_fingerprint_stays_what_it_is() -> None:
    """Stored ledgers hold them: a change of the form would run everything again."""
    identity = {"version": 1, "seed": 42, "rate": 1e-3, "start": (2, 5), "name": "ä", "none": None}
    form = '{"name":"\\u00e4","none":null,"rate":0.001,"seed":42,"start":[2,5],"version":1}'
    assert canonical_json(identity) == form
    assert fingerprint(identity) == "4cd606ba847e32a500bfec104b170508"


@pytest.mark.parametrize(
    "value",
    [Path("x"), len, lambda: None, {1}, frozenset(), b"x", bytearray(b"x"), object(), range(3),
     np.arange(3), np.float32(1), np.int64(1), {1: 2}, {None: 1}, {True: 1}, 1j,
     memoryview(b"ab")],
)  # fmt: skip
def test_values_without_a_stable_form_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^identity\.a\.b\[0\]\[0\]: "):
        fingerprint({"a": {"b": [(value,)]}})


@given(st.dictionaries(st.text(), plain, max_size=4), st.dictionaries(st.text(), plain, max_size=4))
def test_there_are_differences_exactly_where_fingerprints_differ(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    assert bool(differences(left, right)) == (fingerprint(left) != fingerprint(right))
    assert differences({"a": [math.nan]}, {"a": [float("nan")]}) == {}


def test_source_is_of_the_experiment_and_what_it_imports_beside_it(tmp_path, monkeypatch):
    (tmp_path / "traced" / "exp").mkdir(parents=True)
    imports = {"exp/__init__": "from traced import shared\nimport json, torch\n"}
    imports["shared"] = "import raypipe\n"
    for name in ("__init__", "exp/__init__", "exp/lonely", "shared", "other"):
        (tmp_path / "traced" / f"{name}.py").write_text(imports.get(name, ""))
    monkeypatch.syspath_prepend(tmp_path)
    found = ["traced", "traced.exp", "traced.exp.lonely", "traced.shared"]
    assert sorted(source_of("traced.exp").modules) == found


def test_each_command_has_its_environment_and_rows_refer_to_it(work):
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    (work / ".gitignore").write_text("run/\n__pycache__/\n")
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run([*git, *arguments], cwd=work, check=True)
    raypipe("run", "toy.yaml", "--run-dir", "run")
    (work / "toy.yaml").write_text("experiment: toy\nsquares: {numbers: [1, 2, 3, 4]}\n")
    raypipe("run", "toy.yaml", "--run-dir", "run")
    first, second = table("run", "environment").to_dict("records")
    assert first["command_id"] != second["command_id"]
    assert first["git_commit"] == second["git_commit"]
    assert (first["git_dirty"], second["git_dirty"]) == (False, True)
    assert first["command"].startswith("raypipe run toy.yaml --run-dir")
    assert all(row["numpy"] and row["torch"] and row["optuna"] for row in (first, second))
    commands = table("run", "evaluations").set_index("dataset")["command_id"]
    ran = [commands[f"squares/{n}"] for n in (1, 4)]
    assert ran == [first["command_id"], second["command_id"]]


def test_provenance_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_commit() is None
    monkeypatch.setenv("PATH", "")
    assert provenance.git_commit() is None


def test_a_view_has_the_declared_keys_alone():
    settings = SettingsView(SweptSettings(), ("width", "train.loader"), "train")
    assert (settings.width, settings.train.loader.workers) == (4, 0)
    for read in (lambda: settings.fail, lambda: settings.train.scaling):
        with pytest.raises(AttributeError, match="add it to `reads`"):
            read()
    with pytest.raises(AttributeError, match="immutable"):
        settings.width = 1
    with pytest.raises(ValueError, match=r"'train\.height', which is not a key"):
        SettingsView(SweptSettings(), ("train.height",), "train")
