"""Points of a sweep that are proposed by a sampler."""

from __future__ import annotations

from types import SimpleNamespace

from raypipe.study.sweep_search import SweepSearch
from raypipe.study.sweep_settings import SweepSettings

AXES = {"rate": {"low": 1e-4, "high": 1.0, "log": True}, "size": {"low": 1, "high": 64}}
OBJECTIVE = SimpleNamespace(cost=lambda row: row["loss"])


def made(samples: int, rows: list[dict]) -> SweepSearch:
    sweep = SweepSettings(stage="train", axes=AXES, search="optuna", samples=samples)
    maker = SimpleNamespace(
        sweep=sweep,
        key=lambda name: name,
        trial=lambda point: SimpleNamespace(unit=SimpleNamespace(key=str(point)), point=point),
    )
    return SweepSearch(maker, OBJECTIVE, "search", rows)


def drive(search: SweepSearch, rows: list[dict]) -> list[dict]:
    """Evaluate the points one by one, and return their rows."""
    rows = list(rows)
    while (trial := search.ask()) is not None:
        loss = abs(trial.point["rate"] - 0.01) + abs(trial.point["size"] - 20)
        row = {"trial_id": trial.unit.key, "point": trial.point, "status": "succeeded"}
        row |= {"loss": loss, **search.about(trial)}
        search.tell(trial, row)
        rows.append(row)
    return rows


def test_a_continued_search_proposes_the_points_of_an_uninterrupted_one():
    whole = drive(made(12, []), [])
    part = drive(made(8, []), [])
    assert drive(made(12, part), part) == whole
    assert len({row["trial_id"] for row in whole}) == 12


def test_concurrent_points_differ():
    search = made(8, [])
    asked = [search.ask() for _ in range(8)]
    assert len({trial.unit.key for trial in asked if trial is not None}) == 8
