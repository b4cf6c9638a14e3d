"""Measures of predictions, and tests between methods on the same held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import scipy  # loads scipy.stats on first use: it takes half a second
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import f1_score, mean_absolute_error, r2_score, root_mean_squared_error

from experiments.transformer.data import PredictionTarget, Splits
from experiments.transformer.tables import BRANCHES, TRANSFORMER
from raypipe import RunDirectory, StageContext, artifacts, stats


def predictions_path(run_dir: RunDirectory, stage: str) -> str:
    """Return the path of a stage's predictions: a column per method, a row per held-out row."""
    return run_dir.artifact(stage, "predictions.parquet")


def store_predictions(context: StageContext, predicted: Mapping[str, ArrayLike]) -> None:
    """Store the predicted classes ``[n]`` of the methods of a stage."""
    columns = {method: np.asarray(values) for method, values in predicted.items()}
    path = predictions_path(context.run_dir, context.stage.name)
    artifacts.write_parquet(context.run_dir, path, pa.table(columns))


def run_compare(data: Splits, context: StageContext) -> None:
    """Record the tests of McNemar of the transformer and its branches.

    Each is compared with every baseline, and the transformer with each of its branches.
    """
    parts = [
        artifacts.read_parquet(context.run_dir, predictions_path(context.run_dir, stage))
        for stage in ("evaluate", "baselines")
    ]
    methods, baselines = (
        {name: part[name].to_numpy() == data.held_out.target for name in part.column_names}
        for part in parts
    )
    rows: dict[str, dict[str, Any]] = {}
    for method, right in methods.items():
        rows |= comparisons(method, right, baselines)
    branches = {name: right for name, right in methods.items() if name in BRANCHES}
    rows |= comparisons(TRANSFORMER, methods[TRANSFORMER], branches)
    for row in rows.values():
        context.say(
            f"{row['method']} against {row['baseline']}: {row['only_method_right']} rows right "
            f"that it has wrong, {row['only_baseline_right']} the other way round "
            f"(p = {row['p_holm']:.2g})"
        )
    context.finish(context.stage.name, {"comparisons": rows})


def measures(
    gold: NDArray[Any], predicted: NDArray[Any], target: PredictionTarget
) -> dict[str, float]:
    """Return accuracy and macro-F1 over the classes of ``gold``; or RMSE, MAE and R2.

    The accuracy has the 95 % interval of Wilson 1927, for rows drawn from all possible ones.
    """
    if target.kind == "classification":
        classes = np.unique(gold)
        f1 = f1_score(gold, predicted, labels=classes, average="macro", zero_division=0)
        right = int((gold == predicted).sum())
        interval = scipy.stats.binomtest(right, len(gold)).proportion_ci(method="wilson")
        return {
            "accuracy": right / len(gold),
            "accuracy_low": float(interval.low),
            "accuracy_high": float(interval.high),
            "macro_f1": float(f1),
        }
    truth, guess = (
        target.mean + target.deviation * v.astype(np.float64) for v in (gold, predicted)
    )
    measured = {
        "rmse": float(root_mean_squared_error(truth, guess)),
        "mae": float(mean_absolute_error(truth, guess)),
    }
    if len(truth) > 1:  # otherwise it is not defined
        measured["r2"] = float(r2_score(truth, guess))
    return measured


def comparisons(
    method: str, right: NDArray[np.bool_], baselines: Mapping[str, NDArray[np.bool_]]
) -> dict[str, dict[str, Any]]:
    """Return a row per baseline from which predictions ``[n]`` are right."""
    tests = {name: mcnemar(right, other) for name, other in baselines.items()}
    corrected = stats.holm([p_value for *_, p_value in tests.values()])
    return {
        f"{method}/{name}": {
            "method": method,
            "baseline": name,
            "rows": len(right),
            "only_method_right": only_method,
            "only_baseline_right": only_baseline,
            "p_value": p_value,
            "p_holm": float(p_holm),
        }
        for (name, (only_method, only_baseline, p_value)), p_holm in zip(
            tests.items(), corrected, strict=True
        )
    }


def mcnemar(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> tuple[int, int, float]:
    """Return the rows that only the first and only the second has right, and the p-value.

    The p-value is that of the exact test of McNemar 1947, two-sided: of the rows that only one has
    right, each has half.

    Args:
        first: whether the first is right, ``[n]``.
        second: whether the second is right, ``[n]``.

    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    differing = only_first + only_second
    p_value = float(scipy.stats.binomtest(only_first, differing).pvalue) if differing else 1.0
    return only_first, only_second, p_value
