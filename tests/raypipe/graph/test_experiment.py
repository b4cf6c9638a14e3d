from __future__ import annotations

from pathlib import Path

import pytest

from raypipe import provenance
from raypipe.graph.experiment import Stage, in_order, with_needs


def stage(name: str, *needs: str) -> Stage:
    return Stage(name, lambda context: None, [], needs)


def names(stages: list[Stage]) -> list[str]:
    return [each.name for each in stages]


def test_stages_come_after_their_needs_and_otherwise_as_given() -> None:
    given = [stage("d", "b", "c"), stage("a"), stage("c", "a"), stage("b", "a")]
    assert names(in_order(given)) == ["a", "b", "c", "d"]
    assert names(with_needs(given, ["c"])) == ["a", "c"]
    assert names(with_needs(given, ["b", "d"])) == ["a", "b", "c", "d"]


def test_a_long_ladder_of_needs_is_walked_once() -> None:
    ladder = [stage("0a"), stage("0b")]
    for step in range(1, 60):  # 2**60 ways down
        above = (f"{step - 1}a", f"{step - 1}b")
        ladder += [stage(f"{step}a", *above), stage(f"{step}b", *above)]
    assert len(in_order(ladder)) == 120


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([stage("a"), stage("a")], "same name"),
        ([stage("a", "b")], "'a' needs 'b', which does not exist"),
        ([stage("a", "c"), stage("b", "a"), stage("c", "b")], "a -> c -> b -> a"),
        ([stage("a", "a")], "a -> a"),
    ],
)
def test_stages_that_cannot_be_ordered(stages: list[Stage], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        in_order(stages)


def test_provenance_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_commit() is None
    monkeypatch.setenv("PATH", "")
    assert provenance.git_commit() is None
    row = provenance.environment_row()
    assert all(row[name] for name in ("cpus", "torch", "ray", "raypipe"))
