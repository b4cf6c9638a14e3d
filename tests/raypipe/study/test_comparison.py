"""The comparison of variants agrees with scipy on the same numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from raypipe.config.matrix import value_text
from raypipe.report.results import Declarations, RunResults, training_measures
from raypipe.report.sections import variants_section
from raypipe.stats import holm
from raypipe.store.tables import Column, Table
from raypipe.study.comparison import compared

RATES, SIZES, SEEDS = ("0.1", "0.2", "0.3"), ("4", "8"), tuple(map(str, range(8)))


def variants(points: dict[str, dict[str, str]]) -> pd.DataFrame:
    """Return the table of variants by name."""
    rows = [(name, *pair) for name, point in points.items() for pair in point.items()]
    return pd.DataFrame(rows, columns=["variant", "key", "value"])


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    """Return measures of 3 rates x 2 sizes x 8 seeds, and a stage that all rates share."""
    random = np.random.default_rng(0)
    points, measured = {}, []
    for rate, size, seed in product(RATES, SIZES, SEEDS):
        name = f"rate={rate},seed={seed},size={size}"
        points[name] = {"rate": rate, "size": size, "seed": seed}
        value = float(rate) + 0.01 * int(size) + random.normal(0, 0.01)
        row = {"variant": name, "method": "ours", "value": value, "count": 3}
        measured.append({"run_id": "r", "command_id": "c", **row})
    for seed in SEEDS:
        name = f"seed={seed}"
        points[name] = {"seed": seed}
        shared = {"variant": name, "method": "baseline", "value": 1.0, "count": 3}
        measured.append({"run_id": "r", "command_id": "c", **shared})
    return {"variants": variants(points), "measures": pd.DataFrame(measured)}


def summary(tables: dict[str, pd.DataFrame], axis: str) -> pd.DataFrame:
    found = compared(tables)["variant_metrics"]
    return found[found["axis"] == axis].set_index("value")


def seeded(**columns: list[float]) -> dict[str, pd.DataFrame]:
    """Return trainings of a matrix over two rates and two values of a training's own seed."""
    points, rows = {}, []
    for place, (rate, seed) in enumerate(product(RATES[:2], ("0", "1"))):
        name = f"fit.rate={rate},fit.seed={seed}"
        points[name] = {"fit.rate": rate, "fit.seed": seed}
        own = {column: values[place] for column, values in columns.items()}
        rows.append({"variant": name, "stage": "fit", "status": "succeeded", **own})
    return {"variants": variants(points), "trials": pd.DataFrame(rows)}


def test_any_seed_is_averaged_over_and_not_compared():
    tables = seeded(eval_accuracy=[0.9, 0.5, 0.8, 0.8])
    means = summary(tables, "fit.rate")
    assert set(compared(tables)["variant_metrics"]["axis"]) == {"fit.rate"}
    assert list(means["mean"]) == [pytest.approx(0.7), pytest.approx(0.8)]
    assert list(means["seeds"]) == [2, 2]
    assert variants_section(RunResults(tables)).parts[0] == "2 points, 2 seeds."


def test_the_interval_of_a_speed_has_no_negative_end():
    tables = seeded(samples_per_s=[10.0, 900.0, 800.0, 810.0])
    found = summary(tables, "fit.rate")
    assert found.loc["0.1", "low"] == 0
    assert 0 < found.loc["0.2", "low"] < 805 < found.loc["0.2", "high"]


def test_a_monitored_metric_stands_for_a_training() -> None:
    quality = Column("eval_quality", "real", "Quality.", better="higher")
    found = ("loss_final", "eval_loss", "eval_quality", "eval_size")
    first, *_ = training_measures(found, (quality,), {"eval_size": "higher"})
    assert (first.name, first.better) == ("eval_size", "higher")
    assert training_measures(("steps",), (), {}) == []


def test_means_and_intervals_are_those_over_seeds(tables):
    found = summary(tables, "rate")
    assert set(found["metric"]) == {"measures.value (ours)"}
    ours = tables["measures"].query("method == 'ours'")
    parts = ours["variant"].str.extract(r"rate=(?P<rate>.+),seed=(?P<seed>.+),size=.+")
    wide = pd.concat([ours["value"], parts], axis=1).pivot_table("value", "seed", "rate")
    for rate, values in wide.items():
        row = found.loc[rate]
        interval = stats.t.interval(
            0.95, len(values) - 1, loc=values.mean(), scale=stats.sem(values)
        )
        assert row["seeds"] == len(SEEDS)
        assert row["mean"] == pytest.approx(values.mean())
        assert row["std"] == pytest.approx(values.std(ddof=1))
        assert (row["low"], row["high"]) == pytest.approx(interval)


def test_values_are_tested_at_the_points_that_both_have(tables):
    """The size changes the value more than the rate; a missing size must not look like a rate."""
    tables["measures"]["value"] += tables["measures"]["variant"].str.contains("size=8") * 5.0
    missing = tables["measures"]["variant"].str.contains(
        "rate=0.3,seed=.,size=8|rate=0.2,seed=[12],size=4"
    )
    partial = {**tables, "measures": tables["measures"][~missing]}
    found = compared(partial)["variant_tests"].query("axis == 'rate'")
    found = found.set_index(["first", "second"])
    ours = tables["measures"].query("method == 'ours'").set_index("variant")["value"]

    def of(rate: str, seed: str, *sizes: str) -> float:
        return float(np.mean([ours[f"rate={rate},seed={seed},size={size}"] for size in sizes]))

    shared = {  # sizes by pair and seed
        ("0.1", "0.2"): lambda seed: ("8",) if seed in "12" else SIZES,
        ("0.1", "0.3"): lambda seed: ("4",),
        ("0.2", "0.3"): lambda seed: () if seed in "12" else ("4",),
    }
    for (a, b), sizes in shared.items():
        known = [seed for seed in SEEDS if sizes(seed)]
        first = [of(a, seed, *sizes(seed)) for seed in known]
        second = [of(b, seed, *sizes(seed)) for seed in known]
        row = found.loc[(a, b)]
        assert row["p_value"] == pytest.approx(stats.wilcoxon(first, second).pvalue)
        assert (row["n"], row["dropped"]) == (len(known), len(SEEDS) - len(known))
        assert row["effect"] == -1  # the lower rate is lower at equal sizes

    assert list(found["p_holm"]) == pytest.approx(holm(found["p_value"]))
    means = summary(partial, "rate")
    assert list(means["unmatched"]) == [8 + 2, 8, 2]
    assert means.loc["0.3", "mean"] < means.loc["0.1", "mean"]  # over other points, and said to be:


def test_the_yaml_of_the_best_point_has_its_values():
    points = {
        name: {"fit.layers": value_text(layers), "fit.name": value_text(name)}
        for layers, name in ((1, "yes"), (2, "1"))
    }
    scores = pd.DataFrame({"variant": ["yes", "1"], "score": [0.1, 0.9]})
    table = Table("scores", "a score", (Column("score", "real", "It.", better="higher"),))
    tables = {"variants": variants(points), "scores": scores}
    run = RunResults(tables, declared=Declarations(tables=(table,)))
    fold = variants_section(run).parts[-1]
    assert fold.title == "Configuration of the best scores.score"
    assert yaml.safe_load(fold.parts[0].text) == {"fit": {"layers": 2, "name": "1"}}
