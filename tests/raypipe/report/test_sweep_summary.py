"""What the first screen says of a sweep."""

from __future__ import annotations

from dataclasses import replace

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
    about = _about(reason="The fastest. Mind that its speed varied by 300 %.")
    (tiles,) = came_out(about)
    assert isinstance(tiles, Tiles)
    (tile,) = tiles.tiles
    assert tile.label == f"{STAGE}, samples/s (higher is better)"
    assert "slowest of 17: " in tile.note
    assert list(certainty(about)) == [
        f"{STAGE}: each point was measured once, so there is no interval.",
    ]


def test_the_interval_of_rounds_is_how_certain_it_is() -> None:
    about = _about(
        decided=True, rounds=5, ratio=1.5, ratio_low=1.2, ratio_high=1.8, runner_up="bf16, 64"
    )
    assert list(certainty(about)) == [
        f"{STAGE}: 1.5 times the second best, bf16, 64; the interval is 1.2 to 1.8."
    ]
    undecided = _about(decided=False, rounds=5)
    assert list(certainty(undecided)) == [
        f"{STAGE}: the measurements do not decide which point is the best."
    ]


def test_the_next_step_of_an_undecided_sweep_is_a_longer_one() -> None:
    longer = "sweep.rounds.most=32 sweep.rounds.seconds=120"
    about = _about(decided=False, longer=longer)
    text, code = advice(about)
    assert isinstance(text, str)
    assert text.startswith(f"The measurements do not tell which settings of {STAGE} are the best.")
    assert code == Code(f"raypipe sweep x.yaml a=1 --run-dir r {longer}")
    again = replace(
        about,
        command="raypipe sweep x.yaml sweep.rounds.most=16 sweep.rounds.seconds=60 --run-dir r",
    )
    assert list(advice(again))[1] == Code(f"raypipe sweep x.yaml {longer} --run-dir r")


def test_the_next_step_trains_with_what_is_recommended() -> None:
    assert list(advice(_about())) == [
        f"Train {STAGE} with the recommended settings:",
        Code(f"raypipe run x.yaml a=1 {STAGE}.training.micro_batch=128"),
    ]
