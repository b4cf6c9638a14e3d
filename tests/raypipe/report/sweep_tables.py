"""Tables of sweeps as the figures and the page of the tests take them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product

import pandas as pd

from raypipe.study.tables import PARETO, RECOMMENDATIONS
from raypipe.training.tables import TRIALS

STAGE = "train_medium"
GIB = 2**30
CAPACITY = 100 * GIB
STATIC, SLOPE = 2 * GIB, {"fp32": 1.5 * GIB, "bf16": 0.75 * GIB}
SPEED = {"fp32": 90.0, "bf16": 400.0}

Tables = dict[str, pd.DataFrame]


def trial_row(number: int, point: dict[str, object], **values: object) -> dict[str, object]:
    keys = {f"{STAGE}.training.{key}": value for key, value in point.items()}
    return {
        "trial_id": f"sweep/{STAGE}/{number:012x}", "stage": "sweep", "trained_stage": STAGE,
        "kind": "systems", "status": "succeeded", "reason": None, "reference": False,
        "point": json.dumps(keys), "accumulation": 1, "workers": 1, "strategy": "ddp",
        "compile": False, "device": "NVIDIA H200", "loss_final": 2.0, **point, **values,
    }  # fmt: skip


def systems_tables(checkpointing: Iterable[bool] = (False, True)) -> Tables:
    """A sweep of micro-batch, precision and checkpointing that runs into the capacity."""
    trials: list[dict[str, object]] = []
    for precision, on in product(SLOPE, checkpointing):
        slope, ran_out = SLOPE[precision] * (0.25 if on else 1), 0
        for size in (16, 32, 64, 128, 256):
            point = {"micro_batch": size, "precision": precision, "gradient_checkpointing": on}
            peak, speed = STATIC + slope * size, SPEED[precision] * size / (size + 20)
            row = trial_row(len(trials), point)
            if peak > CAPACITY:
                row |= {"status": "skipped" if ran_out else "out_of_memory"}
                row |= {"reason": f"{peak / GIB:.0f} GiB needed"}
                ran_out = ran_out or size
            else:
                speed *= 0.8 if on else 1
                row |= {"samples_per_s": speed, "gpu_peak_bytes": peak, "host_peak_bytes": 4e9,
                        "energy_j_per_sample": 300 / speed,
                        "parity": None if precision == "fp32" else 0.002}  # fmt: skip
            trials.append(row)
    table = pd.DataFrame(trials)
    best = table.loc[table["samples_per_s"].idxmax()]
    steps = [
        {"trial_id": row["trial_id"], "step": step, "loss": 3 + 1 / step, "lr": 0.1,
         "samples_per_s": 9.0}
        for row in trials if row["status"] == "succeeded" for step in range(1, 21)
    ]  # fmt: skip
    return {
        "trials": table,
        "pareto": pd.DataFrame(
            {"trial_id": [best["trial_id"]], "point": [best["point"]],
             "samples_per_s": [best["samples_per_s"]], "peak_bytes": [best["gpu_peak_bytes"]],
             "energy_j_per_sample": [best["energy_j_per_sample"]]}
        ),
        "recommendations": pd.DataFrame(
            {"trained_stage": [STAGE], "trial_id": [best["trial_id"]],
             "metric": ["samples_per_s"], "mode": ["max"], "value": [best["samples_per_s"]],
             "reason": ["The <fastest> that fits."], "settings": [best["point"]],
             "snippet": [f"{STAGE}:\n  training:\n    micro_batch: 128\n"]}
        ),
        "steps": pd.DataFrame(steps),
    }  # fmt: skip


def quality_tables(trials: int = 12, **changes: object) -> Tables:
    """Full trainings at several learning rates, of which a scheduler stops two in three."""
    found, steps = [], []
    for i in range(trials):
        last = 300 if i % 3 == 0 else 100
        status = "succeeded" if last == 300 else "interrupted"
        point = {"learning_rate": 10.0 ** -(1 + i / 4)}
        row = trial_row(i, point, kind="quality", status=status, micro_batch=16, precision="fp32",
                   samples_per_s=400.0, host_peak_bytes=5e8)  # fmt: skip
        found.append(row | changes)
        steps += [
            {"trial_id": row["trial_id"], "step": step, "loss": 1 + i / 10 + 3 / step, "lr": 0.1,
             "samples_per_s": 400.0, "eval_loss": 2 + i if step % 100 == 0 else None}
            for step in range(10, last + 1, 10)
        ]  # fmt: skip
    best = pd.DataFrame(
        {"trained_stage": [STAGE], "trial_id": [found[0]["trial_id"]], "metric": ["loss_final"]}
    )
    return {
        "trials": pd.DataFrame(found),
        "steps": pd.DataFrame(steps),
        "recommendations": best,
    }


def stored(tables: Tables) -> Tables:
    """The tables as a run has them: the points of the trials are a table with a column per axis."""
    tables, trials = dict(tables), tables.get("trials")
    if trials is not None and "point" in trials.columns:
        values = [json.loads(text) if isinstance(text, str) else {} for text in trials["point"]]
        points = pd.DataFrame(values, index=trials.index).assign(trial_id=trials["trial_id"])
        tables |= {"trials": trials.drop(columns="point"), "sweep_points": points}
    for declared in (TRIALS, PARETO, RECOMMENDATIONS):
        if (table := tables.get(declared.name)) is not None:
            missing = {column.name for column in declared.columns} - {*table.columns}
            null = pd.Series(None, table.index, dtype=object)
            tables[declared.name] = table.assign(**dict.fromkeys(sorted(missing), null))
    return tables
