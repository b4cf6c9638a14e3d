"""What the first screen says of a sweep."""

from __future__ import annotations

import pandas as pd

from raypipe.report.about import About, Declarations
from raypipe.report.advice import advice
from raypipe.report.sections import Code, Tiles
from raypipe.report.summary import asked, came_out, certainty
from tests.raypipe.report.sweep_tables import STAGE, stored, systems_tables


def _about(**recommendation: object) -> About:
    tables = stored(systems_tables())
    tables["recommendations"] = tables["recommendations"].assign(**recommendation)
    tables["stages"] = pd.DataFrame({"stage": ["sweep"], "status": ["succeeded"]})
    declared = Declarations("Classify things.", (), (), frozenset(tables))
    return About(tables, "toy", "raypipe sweep x.yaml a=1 --run-dir r", "", declared)


def test_a_sweep_is_what_was_asked() -> None:
    text = " ".join(asked(_about()))
    assert text.startswith(
        f"A sweep for the fastest settings of {STAGE} with 20 trials: micro-batch (5 values)"
    )
    assert "Classify" not in text  # which was not done


def test_the_recommended_point_is_what_came_out() -> None:
    about = _about(reason="The fastest.")
    (tiles,) = came_out(about)
    assert isinstance(tiles, Tiles)
    (tile,) = tiles.tiles
    assert tile.label == f"{STAGE}, samples/s (higher is better)"
    assert "slowest of 17: " in tile.note
    assert list(certainty(about)) == [
        f"{STAGE}: each point was measured once, so there is no range.",
    ]


def test_the_range_of_the_measurements_is_how_certain_it_is() -> None:
    about = _about(value_low=90.0, value_high=110.0)
    assert list(certainty(about)) == [f"{STAGE}: the recommended point was measured at 90 to 110."]


def test_the_next_step_trains_with_what_is_recommended() -> None:
    assert list(advice(_about())) == [
        f"Train {STAGE} with the recommended settings:",
        Code(f"raypipe run x.yaml a=1 {STAGE}.training.micro_batch=128"),
    ]
