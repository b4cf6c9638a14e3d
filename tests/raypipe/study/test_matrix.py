"""A matrix: one graph of all points, each computation once, equal to the runs one by one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.commands.configuration import read, resolve
from raypipe.commands.selection import matrix_or_sweep, selected
from raypipe.config.matrix import MatrixSettings
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.study.placement import variant_label
from tests.raypipe.graph.test_scheduler import CPU_NODE
from tests.raypipe.toy import raypipe

CHAIN = """
from pathlib import Path

from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage


class Prepare(Settings):
    length: int = 3


class Fit(Settings):
    seed: int = 5
    rate: float = 1.0
    broken: bool = False


class Judge(Settings):
    power: int = 1


class All(Settings):
    prepare: Prepare = Prepare()
    fit: Fit = Fit()
    judge: Judge = Judge()


def note(context):
    with Path("ran.txt").open("a") as stream:
        stream.write(context.stage.name + "\\n")


def prepare(context):
    note(context)
    text = "x" * context.settings.prepare.length
    context.run_dir.write(context.run_dir.artifact("prepare", "text"), text.encode())


def fit(context):
    note(context)
    settings = context.settings.fit
    if settings.broken:
        raise RuntimeError("cannot fit")
    size = len(context.run_dir.read(context.run_dir.artifact("prepare", "text")))
    weight = size * settings.rate + settings.seed
    context.run_dir.write(context.run_dir.model("fit"), str(weight).encode())
    context.ledger.put("measures", {"weight": {"method": "fit", "value": weight}})


def judge(context):
    note(context)
    weight = float(context.run_dir.read(context.run_dir.model("fit")))
    size = len(context.run_dir.read(context.run_dir.artifact("prepare", "text")))
    score = weight**context.settings.judge.power + size
    context.ledger.put("measures", {"score": {"method": "judge", "value": score}})


def total(context):
    value = sum(row["value"] for row in context.ledger.rows("measures"))
    context.ledger.put("totals", {"total": {"value": value}})


def stages(settings):
    return [
        Stage("prepare", prepare, reads=("prepare",)),
        Stage("fit", fit, needs=("prepare",), reads=("fit",)),
        Stage("judge", judge, needs=("fit",), reads=("judge",)),
        Stage("total", total, needs=("fit", "judge"), reads=(), always_rerun=True),
    ]


EXPERIMENT = Experiment("chain", 1, All, stages)
"""


@pytest.fixture
def chain(work: Path) -> Path:
    (work / "chain.py").write_text(CHAIN)
    (work / "chain.yaml").write_text("experiment: chain\n")
    yield work
    sys.modules.pop("chain", None)


def ran(folder: Path) -> dict[str, int]:
    """Return how often each stage ran since the last call."""
    file = folder / "ran.txt"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return {name: names.count(name) for name in dict.fromkeys(names)}


def values(folder: Path, **point: object) -> dict[str, float]:
    """Return measures and total of the rows that belong to a point."""
    run = RunDirectory.at(folder)
    found: dict[str, float] = {}
    variants = read_table(run, "variants")
    known = {
        name: dict(zip(rows["key"], rows["value"], strict=True))
        for name, rows in variants.groupby("variant")
    }
    for table in ("measures", "totals"):
        for row in read_table(run, table).to_dict("records"):
            of_row = known.get(row["variant"], {})
            if all(str(point[key]) == value for key, value in of_row.items()):
                name = row.get("method", "total")
                assert name not in found
                found[name] = row["value"]
    return found


AXES = ("--matrix", "fit.rate=[1.0,2.0]", "--matrix", "judge.power=[1,2,3]", "--matrix", "runs=2")


def test_the_points_of_a_matrix_equal_the_runs_one_by_one(chain, capsys):
    assert raypipe("run", "chain.yaml", *AXES, "--run-dir", "all") == 0
    assert ran(chain) == {"prepare": 1, "fit": 4, "judge": 12}
    for rate in (1.0, 2.0):
        for power in (1, 2, 3):
            for run in (0, 1):
                name = f"one-{rate}-{power}-{run}"
                keys = (f"fit.rate={rate}", f"judge.power={power}", f"fit.seed={5 + 1000 * run}")
                assert raypipe("run", "chain.yaml", *keys, "--run-dir", name) == 0
                alone = values_alone(chain / name)
                point = {"fit.rate": rate, "judge.power": power, "seed": run}
                assert values(chain / "all", **point) == alone


def values_alone(folder: Path) -> dict[str, float]:
    run = RunDirectory.at(folder)
    measures, totals = read_table(run, "measures"), read_table(run, "totals")
    assert set(measures["variant"]) | set(totals["variant"]) == {"base"}
    found = dict(zip(measures["method"], measures["value"], strict=True))
    return found | {"total": totals["value"].item()}


def test_more_values_and_seeds_compute_only_what_is_new(chain):
    assert raypipe("run", "chain.yaml", *AXES, "--run-dir", "all") == 0
    before = read_table(RunDirectory.at("all"), "measures")
    ran(chain)
    assert raypipe("run", "chain.yaml", *AXES, "--run-dir", "all") == 0
    assert ran(chain) == {}
    more = ("--matrix", "judge.power=[1,2,3,4]")
    assert raypipe("run", "chain.yaml", *AXES, *more, "--run-dir", "all") == 0
    assert ran(chain) == {"judge": 4}
    assert raypipe("run", "chain.yaml", *AXES, *more, "--matrix", "runs=3", "--run-dir", "all") == 0
    assert ran(chain) == {"fit": 2, "judge": 8}
    after = read_table(RunDirectory.at("all"), "measures")
    assert len(after) == 6 + 24
    kept = after.merge(before, on=["variant", "method", "value", "command_id"])
    assert len(kept) == len(before)


def test_a_point_that_fails_stops_only_what_needs_it(chain):
    axes = ("--matrix", "fit.broken=[false,true]", "--matrix", "judge.power=[1,2]")
    assert raypipe("run", "chain.yaml", *axes, "--run-dir", "all") == 1
    stages = read_table(RunDirectory.at("all"), "stages")
    found = {(r.stage, r.variant): r.status for r in stages.itertuples()}
    assert found == {
        ("prepare", "base"): "succeeded",
        ("fit", "fit.broken=false"): "succeeded",
        ("fit", "fit.broken=true"): "failed",
        ("judge", "fit.broken=false,judge.power=1"): "succeeded",
        ("judge", "fit.broken=false,judge.power=2"): "succeeded",
        ("judge", "fit.broken=true,judge.power=1"): "skipped",
        ("judge", "fit.broken=true,judge.power=2"): "skipped",
        ("total", "fit.broken=false,judge.power=1"): "succeeded",
        ("total", "fit.broken=false,judge.power=2"): "succeeded",
        ("total", "fit.broken=true,judge.power=1"): "skipped",
        ("total", "fit.broken=true,judge.power=2"): "skipped",
        ("compare_variants", "base"): "succeeded",
    }
    failures = read_table(RunDirectory.at("all"), "failures")
    assert list(failures["variant"]) == ["fit.broken=true"]


def test_points_and_exclusions(chain):
    (chain / "chain.yaml").write_text(
        """
experiment: chain
matrix:
  judge: {power: [1, 2]}
  points:
    - {fit.rate: 1.0, prepare.length: 4}
    - {fit: {rate: 2.0}}
  exclude:
    - {fit.rate: 2.0, judge.power: 2}
"""
    )
    assert raypipe("run", "chain.yaml", "--run-dir", "all") == 0
    assert ran(chain) == {"prepare": 2, "fit": 2, "judge": 3}
    judged = read_table(RunDirectory.at("all"), "measures").query("method == 'judge'")
    assert sorted(judged["variant"]) == [
        "fit.rate=1.0,judge.power=1,prepare.length=4",
        "fit.rate=1.0,judge.power=2,prepare.length=4",
        "fit.rate=2.0,judge.power=1,prepare.length=3",
    ]


def test_every_table_names_the_variant(chain):
    assert raypipe("run", "chain.yaml", *AXES, "--run-dir", "all") == 0
    run = RunDirectory.at("all")
    for table in run.list(run.path("results")):
        assert read_table(run, table)["variant"].notna().all(), table
    variants = read_table(run, "variants")
    fit = variants[variants["variant"] == "fit.rate=2.0,seed=1"]
    assert dict(zip(fit["key"], fit["number"], strict=True)) == {"fit.rate": 2.0, "seed": 1.0}
    wide = variants.pivot_table(index="variant", columns="key", values="number")
    joined = read_table(run, "measures").merge(wide, on="variant")
    means = joined[joined["method"] == "judge"].groupby("judge.power")["value"].count()
    assert means.to_dict() == {1.0: 4, 2.0: 4, 3.0: 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nokey=[1]", r"matrix \(nokey=1\): nokey = 1: unknown key"),
        ("judge.powr=[1]", "did you mean judge.power"),
        ("judge.power=[1,two]", r"matrix \(judge.power=two\): judge.power = 'two': input should"),
        ("judge.power=[]", "judge.power: is an empty list"),
        ("judge.power=3", "judge.power = 3: must be a list of values"),
        ("judge.power=[1,1]", "judge.power: the value 1 is given twice"),
        ("tracking=[[]]", "the section tracking cannot be varied"),
        ("runs=0", "matrix.runs = 0"),
        ("points=[{fit.seed: 1, seed: 0}]", "fit.seed is an axis, and repetitions .* set it, too"),
        ("exclude=[{judge.power: 1}]", "exclude: judge.power is not varied"),
        ("runs=10001", "has 10,001 points; give --yes"),
    ],
)
def test_an_impossible_matrix_is_one_message(chain, capsys, text, message):
    for command in ("run", "plan"):
        assert raypipe(command, "chain.yaml", "--matrix", text) == 2
        output = capsys.readouterr()
        assert pd.Series([output.err]).str.contains(message).all(), output.err
        assert output.err.count("\n") == 1
    assert not (chain / "runs").exists()


def test_another_matrix_in_the_same_run_directory_is_refused(chain, capsys):
    assert raypipe("run", "chain.yaml", "--run-dir", "all") == 0
    assert raypipe("run", "chain.yaml", *AXES, "--run-dir", "all") == 2
    assert "matrix.keys: stored [], now ['" in capsys.readouterr().err


def test_the_plan_shows_what_the_points_share(chain, capsys):
    assert raypipe("plan", "chain.yaml", *AXES) == 0
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]]
    counts = {line[0]: line[2] for line in lines}
    assert (counts["fit"], counts["judge"]) == ("4", "12")


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


def test_runs_is_an_axis_of_seeds():
    with pytest.raises(ValueError, match="the axis `seed` is also given"):
        MatrixSettings(runs=2, axes={"seed": (1,)})
    assert list(MatrixSettings(runs=2).all_points()) == [{"seed": 0}, {"seed": 1}]


def test_the_report_compares_the_variants_and_shows_one_point(chain, capsys):
    assert raypipe("run", "chain.yaml", *AXES, "--run-dir", "all") == 0
    page = (chain / "all/report/index.html").read_text()
    assert "6 points over fit.rate (2 values), judge.power (3 values), with 2 seeds." in page
    assert "cannot tell: needs at least 6 runs" in page
    assert raypipe("report", "all", "--variant", "fit.rate=2.0,judge.power=3,seed=1") == 0
    assert (
        "the point fit.rate=2.0,judge.power=3,seed=1;"
        in (chain / "all/report/index.html").read_text()
    )
    capsys.readouterr()
    assert raypipe("report", "all", "--variant", "nothing") == 2
    assert "--variant nothing: is not a point" in capsys.readouterr().err


QUICK = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def quick(*overrides: str) -> Configuration:
    return resolve(read(str(QUICK)), ("matrix.lda.max_iter=[3,4]", *overrides), "cpu", [CPU_NODE])


def test_a_matrix_leaves_the_sweep_out_and_a_sweep_alone_the_matrix():
    configuration, message = matrix_or_sweep(quick(), ())
    names = {stage.name for stage in selected(configuration, (), [CPU_NODE]).stages}
    assert "sweep" not in names
    assert "lda" in names
    assert "`raypipe sweep` runs it" in message
    configuration, message = matrix_or_sweep(quick(), ["sweep"])
    graph = selected(configuration, ["sweep"], [CPU_NODE])
    assert (configuration.settings.matrix, graph.text, message) == (None, "", "")
    assert "sweep" in {stage.name for stage in graph.stages}
    assert matrix_or_sweep(quick("sweep=null"), ())[1] == ""


def test_a_matrix_takes_no_settings_from_a_sweep():
    taking = quick("train_small.from_sweep=true")
    with pytest.raises(ConfigError, match=r"train_small\.from_sweep: .* run `raypipe sweep` first"):
        matrix_or_sweep(taking, ())
