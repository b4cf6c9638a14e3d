"""A matrix: one graph of all points, each computation once, equal to the runs one by one.

Commands on matrices, searches and races, and those that are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.store.run_directory import RunDirectory
from raypipe.study.placement import variant_label
from tests.command import raypipe
from tests.raypipe.examples.hills import edit, ran, run, table
from tests.scenario import cases, play

REFUSED = [
    (study["file"], *pair) for study in cases(__file__, "refused") for pair in study["refused"]
]
AXES = ("fit.rate=[1.0,2.0]", "judge.power=[1,2,3]", "runs=2")


@pytest.fixture(autouse=True)
def chain(hill: Path) -> None:
    (hill / "hill.yaml").write_text("experiment: hill\ntotal: true\n")


def values(folder: str, *variants: str) -> list[float]:
    """Return the measures and the total of variants."""
    rows = pd.concat([table(name, folder) for name in ("measures", "totals")])
    return sorted(rows[rows["variant"].isin(variants)]["value"])


def test_the_points_of_a_matrix_equal_the_runs_one_by_one():
    run(*AXES)
    assert ran() == {"prepare": 1, "fit": 4, "judge": 12}
    for rate, power, seed in [(1.0, 3, 1), (2.0, 1, 0)]:
        name = f"one-{rate}-{power}-{seed}"
        keys = (f"fit.rate={rate}", f"judge.power={power}", f"fit.seed={5 + 1000 * seed}")
        run(folder=name, words=keys)
        alone = values(name, "base")
        assert len(alone) == 3
        of_both = f"fit.rate={rate},judge.power={power},seed={seed}"
        assert values("run", f"fit.rate={rate},seed={seed}", of_both) == alone


@pytest.mark.usefixtures("report")
def test_every_table_and_the_report_have_the_variants():
    edit("from raypipe.store", "from raypipe.report.parts import Section\nfrom raypipe.store")
    edit("(MEASURES,))", "(MEASURES,), report=lambda tables: [Section('Own', ['A text.'])])")
    run(*AXES)
    where = RunDirectory.at("run")
    for name in where.list(where.path("results")):
        assert table(name)["variant"].notna().all(), name
    wide = table("variants").pivot_table(index="variant", columns="key", values="number")
    assert wide.loc["fit.rate=2.0,seed=1"].dropna().to_dict() == {"fit.rate": 2.0, "seed": 1.0}
    text = Path("run/report/index.html").read_text()
    assert "6 points, 2 seeds." in text
    assert "cannot tell: needs at least 6 runs" in text
    assert "A text." not in text  # the experiment's own sections are of one point


values_of_axes = st.dictionaries(
    st.text("abc.", min_size=1, max_size=3),
    st.one_of(st.booleans(), st.integers(), st.text('abc=,1"', max_size=90)),
)


@given(one=values_of_axes, other=values_of_axes)
def test_different_points_have_different_names(one, other):
    if json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
        assert variant_label(one) != variant_label(other)
    assert len(variant_label(one)) <= len("~01234567") + 80
    assert "/" not in variant_label(one)


@pytest.mark.parametrize(("file", "key", "message"), REFUSED, ids=[case[1] for case in REFUSED])
def test_an_impossible_study_is_one_message(file, key, message):
    Path("hill.yaml").write_text(file)
    for command in ("run", "plan"):
        error = raypipe(command, "hill.yaml", "--matrix", key, expected=2)
        assert message in error
        assert error.count("\n") == 1, error
    assert not Path("runs").exists()


@pytest.mark.parametrize("case", cases(__file__, "hill"), ids=lambda case: case["name"])
def test_commands_on_studies(case):
    play(case["commands"])
