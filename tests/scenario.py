"""Scenarios in YAML: commands one after the other in a folder, and what each says and leaves.

A case has a ``name`` and ``commands``; one that takes seconds is ``slow``. Before a command runs,
``files`` are written (what is no text as JSON), texts of files are replaced by ``edit``
(``{file: [text, other text]}``), ``remove`` lists files to delete, and the variables of
``environment`` are set. The command has ``words``, and a ``status`` of its exit or 0.

Its output, and of a refusal the standard error, ``says`` some texts and ``lacks`` others, whatever
their spaces; it ``matches`` regular expressions, ``ends`` with a line, and has some texts so many
``times``. ``reads`` is the same for files. ``leaves`` has the names in a folder. What is below the
``unchanged`` paths is as it was before the command.

``columns`` are the first of a table, ``listed`` has values of columns in the order of a table,
``tables`` values of all rows in the order of the first one's (of a text a part), ``rows`` their
number. ``kept`` lists tables whose rows of the command before are all
still there. ``{name}`` stands for what the test gives.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from raypipe.launch.inline import InlineLauncher
from tests.command import Ended, forget, in_process, table

Step = Mapping[str, Any]


def cases(test: str, name: str) -> Any:
    """The content of a YAML file next to a test."""
    text = Path(test).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    # every process of a run reads all of them; libyaml knows no half of a character
    return yaml.load(text, yaml.SafeLoader if r"\udc" in text else yaml.CSafeLoader)


def named_cases(test: str, name: str) -> list[Any]:
    """The same as parameters with the names of the cases, some of which are slow."""
    return [
        pytest.param(case, id=case["name"], marks=[pytest.mark.slow] * case.get("slow", False))
        for case in cases(test, name)
    ]


def by_words(step: Step) -> Ended:
    environment = step.get("environment", {})
    return in_process(InlineLauncher(), *shlex.split(step["words"]), environment=environment)


def play(
    commands: Sequence[Step], run: Callable[[Step], Ended] = by_words, at: str = "r", **names: str
) -> None:
    """Run the commands of a case in the current directory, with the run directory ``at``."""
    for each in commands:
        step = _filled(each, names)
        _prepare(step)
        kept = {name: table(at, name) for name in step.get("kept", ())}
        before = {path: content(path) for path in step.get("unchanged", ())}
        ended = run(step)
        assert ended.status == step.get("status", 0), ended.output
        _check(ended.errors if ended.status == 2 else ended.output, step)
        for file, expected in step.get("reads", {}).items():
            _check(Path(file).read_text(encoding="utf-8"), expected)
        for folder, left in step.get("leaves", {}).items():
            found = {path.name for path in Path(folder).iterdir()} - {"__pycache__"}
            assert found == set(left)
        _check_tables(at, step)
        for name, rows in kept.items():
            _assert_kept(rows, table(at, name))
        assert {path: content(path) for path in before} == before


def content(folder: str | Path) -> dict[str, str]:
    """A checksum of each file below a folder, but for what Python compiled."""
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {_filled(key, names): _filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, names) for each in value]
    for name, text in names.items():
        value = value.replace(f"{{{name}}}", text) if isinstance(value, str) else value
    return value


def _prepare(step: Step) -> None:
    write_files(Path(), step.get("files", {}))
    for file, (old, new) in step.get("edit", {}).items():
        edit(file, old, new)
    for file in step.get("remove", ()):
        Path(file).unlink()
    forget(Path.cwd())


def write_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Write files by their names in a folder, what is no text as JSON."""
    for name, content in files.items():
        path, text = folder / name, content if isinstance(content, str) else json.dumps(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def edit(file: str | Path, old: str, new: str) -> None:
    """Change the text of a file; the next command imports it anew."""
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new, 1))
    forget(Path.cwd())


def _check(text: str, step: Step) -> None:
    shown = _flat(text)
    assert [each for each in step.get("says", ()) if _flat(each) not in shown] == [], text
    assert [each for each in step.get("lacks", ()) if each in shown] == [], text
    assert [each for each in step.get("matches", ()) if not re.search(each, text)] == [], text
    assert f"\n{text}".rstrip().endswith(f"\n{step['ends']}" if "ends" in step else ""), text
    assert {each: text.count(each) for each in step.get("times", ())} == step.get("times", {}), text


def _flat(text: str) -> str:
    return " ".join(text.split())


def _check_tables(at: str, step: Step) -> None:
    for name, columns in step.get("columns", {}).items():
        assert list(table(at, name).columns[3:][: len(columns)]) == columns
    for name, columns in step.get("listed", {}).items():
        rows = table(at, name)
        for column, values in columns.items():
            assert [None if pd.isna(value) else value for value in rows[column]] == values
    for name, expected in step.get("tables", {}).items():
        rows = table(at, name).sort_values(list(expected[0])).to_dict("records")
        for row, values in zip(rows, expected, strict=True):
            assert [k for k, v in values.items() if not _is_like(row[k], v)] == [], row
    assert {name: len(table(at, name)) for name in step.get("rows", ())} == step.get("rows", {})


def _is_like(value: Any, expected: Any) -> bool:
    """Whether a value of a table is the expected one, of a text a part of it."""
    if isinstance(expected, str):
        return expected in value
    return bool(value == expected) or (expected is None and pd.isna(value))


def _assert_kept(before: pd.DataFrame, after: pd.DataFrame) -> None:
    """Check that all rows are still there; a column that was asked for before may be missing."""
    columns = list(before.columns.intersection(after.columns))
    old, new = (rows[columns].astype(object) for rows in (before, after))
    assert set(old.merge(new, how="left", indicator="found")["found"]) <= {"both"}
