"""The table of the tuning benchmark leaves out what no sampler can improve."""

from __future__ import annotations

import pandas as pd
import pytest

from docs.tuning_tables import measures

#: values of six evaluations of a problem by seed; the first four are the start
FOUND = {
    "open": {"a": [[9, 5, 7, 6, 3, 1]], "b": [[9, 5, 7, 6, 5, 3]]},
    "solved": {"a": [[2, 2, 3, 4, 2, 2]], "b": [[2, 2, 3, 4, 2 - 1e-16, 2 + 4e-16]]},
    "near": {
        "a": [[1, 5, 7, 6, 3, 2], [9, 5, 7, 6, 1, 2]],
        "b": [[1, 5, 7, 6, 3, 2], [9, 5, 7, 6, 3, 2]],
    },
}
LOWEST = {"open": 1.0, "solved": 2.0, "near": 1.0}


def rows(problem: str, sampler: str, seed: int) -> pd.DataFrame:
    values = FOUND[problem][sampler][seed]
    about = {"problem": problem, "data": "x", "parameters": 1, "sampler": sampler, "seed": seed}
    return pd.DataFrame({"number": range(len(values)), "value": values}).assign(**about)


@pytest.fixture
def found() -> tuple[pd.DataFrame, list[str]]:
    runs = pd.concat(
        [
            rows(problem, sampler, seed)
            for problem, samplers in FOUND.items()
            for sampler, seeds in samplers.items()
            for seed in range(len(seeds))
        ]
    )
    tables = [
        {"problem": problem, "data": "x", "value": value}
        for problem, lowest in LOWEST.items()
        for value in (lowest, 9.0)
    ]
    return measures(runs, pd.DataFrame(tables))


def test_regret_is_in_units_of_the_start(found: tuple[pd.DataFrame, list[str]]) -> None:
    one = found[0].loc[(1, "open", "x")]
    # the best of the start is 5, and the regrets of the two evaluations after it are 2, 0 and 4, 2
    assert one["area"].to_dict() == {"a": 0.25, "b": 0.75}
    assert one["last"].to_dict() == {"a": 0, "b": 0.5}
    assert one["evaluations"].to_dict() == {"a": 2, "b": 3}
    assert one["reached"].to_dict() == {"a": True, "b": False}


def test_a_close_start_needs_no_evaluation(found: tuple[pd.DataFrame, list[str]]) -> None:
    near = found[0].loc[(1, "near", "x")]
    assert near["evaluations"].to_dict() == {"a": (0 + 1) / 2, "b": (0 + 3) / 2}
    assert near["reached"].to_dict() == {"a": 1, "b": 0.5}


def test_a_problem_whose_starts_are_all_best_is_named_instead(
    found: tuple[pd.DataFrame, list[str]],
) -> None:
    assert found[1] == ["solved (x)"]
    assert list(found[0].index) == [(1, "near", "x"), (1, "open", "x")]
