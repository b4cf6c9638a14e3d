"""A matrix: one graph of all points, each computation once, equal to the runs one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.commands.configuration import read, resolve
from raypipe.commands.plan import work_of
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.store.run_directory import RunDirectory
from raypipe.study.placement import variant_label
from tests.raypipe.examples.hills import edit, ran, refused, run, table
from tests.raypipe.examples.sweeping import HERE
from tests.raypipe.toy import raypipe

AXES = ("fit.rate=[1.0,2.0]", "judge.power=[1,2,3]", "runs=2")


@pytest.fixture(autouse=True)
def chain(hill: Path) -> None:
    (hill / "hill.yaml").write_text("experiment: hill\ntotal: true\n")


def values(folder: str, **point: object) -> dict[str, float]:
    """Return measures and total of the rows that belong to a point."""
    known = {
        name: dict(zip(rows["key"], rows["value"], strict=True))
        for name, rows in table("variants", folder).groupby("variant")
    }
    found: dict[str, float] = {}
    for name in ("measures", "totals"):
        for row in table(name, folder).to_dict("records"):
            of_row = known.get(row["variant"], {})
            if all(str(point[key]) == value for key, value in of_row.items()):
                assert row.get("method", "total") not in found
                found[row.get("method", "total")] = row["value"]
    return found


def test_the_points_of_a_matrix_equal_the_runs_one_by_one():
    assert run(*AXES) == 0
    assert ran() == {"prepare": 1, "fit": 4, "judge": 12}
    for rate, power, seed in [(1.0, 1, 0), (1.0, 3, 1), (2.0, 2, 1), (2.0, 1, 0), (2.0, 3, 0)]:
        name = f"one-{rate}-{power}-{seed}"
        keys = (f"fit.rate={rate}", f"judge.power={power}", f"fit.seed={5 + 1000 * seed}")
        assert run(folder=name, words=keys) == 0
        alone = values(name)
        assert len(alone) == 3
        assert set(table("measures", name)["variant"]) == {"base"}
        assert values("run", **{"fit.rate": rate, "judge.power": power, "seed": seed}) == alone


def test_more_values_and_seeds_compute_only_what_is_new():
    assert run(*AXES) == 0
    before = table("measures")
    ran()
    assert run(*AXES) == 0
    assert ran() == {}
    more = (*AXES, "judge.power=[1,2,3,4]")
    assert run(*more) == 0
    assert ran() == {"judge": 4}
    assert run(*more, "runs=3") == 0
    assert ran() == {"fit": 2, "judge": 8}
    after = table("measures")
    assert len(after) == 6 + 24
    assert len(after.merge(before, on=["variant", "method", "value"])) == len(before)


def test_a_point_that_fails_stops_only_what_needs_it():
    assert run("fit.layers=[2,13]", "judge.power=[1,2]") == 1
    found = {(r.stage, r.variant): r.status for r in table("stages").itertuples()}
    expected = {("prepare", "base"): "succeeded"}
    for layers, fit, rest in ((2, "succeeded", "succeeded"), (13, "failed", "skipped")):
        expected["fit", f"fit.layers={layers}"] = fit
        for power in (1, 2):
            for stage in ("judge", "total"):
                expected[stage, f"fit.layers={layers},judge.power={power}"] = rest
    assert found == expected
    assert list(table("failures")["variant"]) == ["fit.layers=13"]


def test_points_and_exclusions(hill):
    (hill / "hill.yaml").write_text(
        """
experiment: hill
matrix:
  judge: {power: [1, 2]}
  points:
    - {fit.rate: 1.0, prepare.length: 4}
    - {fit: {rate: 2.0}}
  exclude:
    - {fit.rate: 2.0, judge.power: 2}
"""
    )
    assert run() == 0
    assert ran() == {"prepare": 2, "fit": 2, "judge": 3}
    assert sorted(table("measures").query("method == 'judge'")["variant"]) == [
        "fit.rate=1.0,judge.power=1,prepare.length=4",
        "fit.rate=1.0,judge.power=2,prepare.length=4",
        "fit.rate=2.0,judge.power=1,prepare.length=3",
    ]


def test_every_table_and_the_report_have_the_variants(capsys):
    edit("from raypipe.store", "from raypipe.report.parts import Section\nfrom raypipe.store")
    edit("(MEASURES,))", "(MEASURES,), report=lambda tables: [Section('Own', ['A text.'])])")
    assert run(*AXES) == 0
    where = RunDirectory.at("run")
    for name in where.list(where.path("results")):
        assert table(name)["variant"].notna().all(), name
    variants = table("variants")
    fit = variants[variants["variant"] == "fit.rate=2.0,seed=1"]
    assert dict(zip(fit["key"], fit["number"], strict=True)) == {"fit.rate": 2.0, "seed": 1.0}
    wide = variants.pivot_table(index="variant", columns="key", values="number")
    joined = table("measures").query("method == 'judge'").merge(wide, on="variant")
    assert joined.groupby("judge.power")["value"].count().to_dict() == {1.0: 4, 2.0: 4, 3.0: 4}
    page = Path("run/report/index.html")
    text = page.read_text()
    assert "6 points, 2 seeds." in text
    assert "cannot tell: needs at least 6 runs" in text
    point = "fit.rate=2.0,judge.power=3,seed=1"
    assert raypipe("report", "run", "--variant", point) == 0
    assert f"the point {point};" in page.read_text()
    capsys.readouterr()
    assert raypipe("report", "run", "--variant", "nothing") == 2
    assert "--variant nothing: is not a point" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nokey=[1]", "matrix (nokey=1): nokey = 1: unknown key"),
        ("judge.powr=[1]", "did you mean judge.power"),
        ("judge.power=[1,two]", "matrix (judge.power=two): judge.power = 'two': input should"),
        ("judge.power=[]", "judge.power = []: is an empty list"),
        ("judge.power=3", "judge.power = 3: must be a list of values"),
        ("judge.power=[1,1]", "judge.power = [1, 1]: the value 1 is given twice"),
        ("tracking=[[]]", "the section tracking cannot be varied"),
        ("runs=0", "matrix.runs = 0"),
        ("points=[{fit.seed: 1, seed: 0}]", "fit.seed is an axis, and repetitions"),
        ("exclude=[{judge.power: 1}]", "exclude: judge.power is not varied"),
    ],
)
def test_an_impossible_matrix_is_one_message(capsys, text, message):
    refused(capsys, text, message)


def test_another_matrix_in_the_same_run_directory_is_refused(capsys):
    assert raypipe("plan", "hill.yaml", *(w for axis in AXES for w in ("--matrix", axis))) == 0
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]]
    counts = {line[0]: line[2] for line in lines}
    assert (counts["fit"], counts["judge"]) == ("4", "12")
    assert run() == 0
    assert run(*AXES) == 2
    assert "matrix.keys: stored [], now ['" in capsys.readouterr().err


values_of_axes = st.dictionaries(
    st.text("abc.", min_size=1, max_size=3),
    st.one_of(st.booleans(), st.integers(), st.text('abc=,1"', max_size=90)),
)


@given(one=values_of_axes, other=values_of_axes)
def test_different_points_have_different_names(one, other):
    if json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
        assert variant_label(one) != variant_label(other)
    assert len(variant_label(one)) < 100
    assert "/" not in variant_label(one)


QUICK = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def quick(*overrides: str) -> Configuration:
    return resolve(read(str(QUICK)), ("matrix.lda.max_iter=[3,4]", *overrides), "cpu", [HERE])


def test_a_matrix_leaves_the_sweep_out_and_a_sweep_alone_the_matrix():
    work = work_of(quick(), (), [HERE])
    names = {stage.name for stage in work.graph.stages}
    assert "sweep" not in names
    assert "lda" in names
    assert "`raypipe sweep` runs it" in work.note
    work = work_of(quick(), ["sweep"], [HERE])
    assert (work.configuration.settings.matrix, work.graph.text, work.note) == (None, "", "")
    assert "sweep" in {stage.name for stage in work.graph.stages}
    assert work_of(quick("sweep=null"), (), [HERE]).note == ""
    taking = quick("train_small.from_sweep=true")
    with pytest.raises(ConfigError, match=r"train_small\.from_sweep: .* run `raypipe sweep` first"):
        work_of(taking, (), [HERE])
