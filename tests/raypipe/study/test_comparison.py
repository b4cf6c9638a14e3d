"""The comparison of variants agrees with scipy on the same numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from raypipe.config.matrix import value_text
from raypipe.report.results import Declarations, RunResults, monitors_of, points, training_measures
from raypipe.report.sections import variants_section
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


def paired(tables: dict[str, pd.DataFrame], axis: str) -> pd.DataFrame:
    found = compared(tables)["variant_tests"]
    return found[found["axis"] == axis].set_index(["first", "second"])


def by_rate(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return seeds x rates, averaged over the sizes."""
    ours = tables["measures"].query("method == 'ours'")
    parts = ours["variant"].str.extract(r"rate=(?P<rate>.+),seed=(?P<seed>.+),size=(?P<size>.+)")
    together = pd.concat([ours["value"], parts], axis=1)
    return together.pivot_table(index="seed", columns="rate", values="value", aggfunc="mean")


def seeded(rates: tuple[str, ...], **columns: list[float]) -> dict[str, pd.DataFrame]:
    """Return trainings of a matrix over rates and two values of a training's own seed."""
    points, rows = {}, []
    for place, (rate, seed) in enumerate(product(rates, ("0", "1"))):
        name = f"fit.rate={rate},fit.seed={seed}"
        points[name] = {"fit.rate": rate, "fit.seed": seed}
        own = {column: values[place] for column, values in columns.items()}
        rows.append({"variant": name, "stage": "fit", "status": "succeeded", **own})
    return {"variants": variants(points), "trials": pd.DataFrame(rows)}


def test_any_seed_is_averaged_over_and_not_compared():
    tables = seeded(("0.1", "0.2"), eval_accuracy=[0.9, 0.5, 0.8, 0.8])
    means = summary(tables, "fit.rate")
    assert set(compared(tables)["variant_metrics"]["axis"]) == {"fit.rate"}
    assert list(means["mean"]) == [pytest.approx(0.7), pytest.approx(0.8)]
    assert list(means["seeds"]) == [2, 2]
    assert variants_section(RunResults(tables)).parts[0] == "2 points, 2 seeds."


def test_the_interval_of_a_speed_has_no_negative_end():
    tables = seeded(("0.1", "0.2"), samples_per_s=[10.0, 900.0, 800.0, 810.0])
    found = summary(tables, "fit.rate")
    assert found.loc["0.1", "low"] == 0
    assert 0 < found.loc["0.2", "low"] < 805 < found.loc["0.2", "high"]


def test_held_out_metrics_stand_for_a_training_before_its_loss():
    def measures(*names: str, **more) -> list[tuple[str, str]]:
        return [(each.name, each.better) for each in training_measures(names, **more)]

    quality = Column("eval_quality", "real", "Quality.", better="higher")
    none: dict[str, object] = {"declared": (), "monitors": {}}
    assert measures("loss_final", "steps", **none) == [("loss_final", "lower")]
    assert measures("steps", **none) == []
    found = ("loss_final", "eval_loss", "eval_accuracy", "eval_size", "eval_quality")
    assert measures(*found, **none) == [("eval_accuracy", "higher"), ("eval_loss", "lower")]
    declared = measures(*found, declared=(quality,), monitors={})
    assert declared[0] == ("eval_quality", "higher")
    settings = {"fit": {"training": {"monitor": {"metric": "size", "mode": "max"}}}}
    monitors = monitors_of(settings)
    assert measures(*found, declared=(quality,), monitors=monitors)[0] == ("eval_size", "higher")


def test_means_and_intervals_are_those_over_seeds(tables):
    found = summary(tables, "rate")
    assert set(found["metric"]) == {"measures.value (ours)"}
    for rate, values in by_rate(tables).items():
        row = found.loc[rate]
        interval = stats.t.interval(
            0.95, len(values) - 1, loc=values.mean(), scale=stats.sem(values)
        )
        assert row["seeds"] == len(SEEDS)
        assert row["mean"] == pytest.approx(values.mean())
        assert row["std"] == pytest.approx(values.std(ddof=1))
        assert (row["low"], row["high"]) == pytest.approx(interval)


def test_the_tests_are_paired_by_seed_and_corrected(tables):
    found = paired(tables, "rate")
    wide = by_rate(tables)
    pairs = [("0.1", "0.2"), ("0.1", "0.3"), ("0.2", "0.3")]
    p_values = [stats.wilcoxon(wide[a], wide[b]).pvalue for a, b in pairs]
    order = np.argsort(p_values, kind="stable")
    holm = np.minimum(np.maximum.accumulate(np.array([3, 2, 1]) * np.array(p_values)[order]), 1)
    for pair, p_value in zip(pairs, p_values, strict=True):
        assert found.loc[pair, "p_value"] == pytest.approx(p_value)
    assert sorted(found["p_holm"]) == pytest.approx(sorted(holm))


def without(tables: dict[str, pd.DataFrame], pattern: str) -> dict[str, pd.DataFrame]:
    """Return the tables without the measures of the variants whose name matches a pattern."""
    missing = tables["measures"]["variant"].str.contains(pattern)
    return {**tables, "measures": tables["measures"][~missing]}


def test_values_are_tested_at_the_points_that_both_have(tables):
    """The size changes the value more than the rate; a missing size must not look like a rate."""
    tables["measures"]["value"] += tables["measures"]["variant"].str.contains("size=8") * 5.0
    partial = without(tables, "rate=0.3,seed=.,size=8|rate=0.2,seed=[12],size=4")
    found = paired(partial, "rate")
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


def test_a_run_without_a_matrix_has_no_comparison():
    assert variants_section(RunResults({})).parts == []
    assert points({}) == []
