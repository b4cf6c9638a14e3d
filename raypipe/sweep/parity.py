"""Loss parity: the difference of a trial's losses from those of the fp32 trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from raypipe.pipeline.context import StageContext
from raypipe.storage import tables as results
from raypipe.storage.ledger import Row
from raypipe.sweep.trials import Trial


def record_parity(context: StageContext, trials: Sequence[Trial]) -> dict[str, Row]:
    """Record the parity of the trials; return the rows of all that have one, by trial."""
    rows = _rows(context, trials)
    context.ledger.put("trials", _with_parity(context, trials, rows))
    return _rows(context, trials)


def _rows(context: StageContext, trials: Sequence[Trial]) -> dict[str, Row]:
    return {
        trial.unit.key: row
        for trial in trials
        if (row := context.ledger.get("trials", trial.unit.key)) is not None
    }


def _with_parity(
    context: StageContext, trials: Sequence[Trial], rows: Mapping[str, Row]
) -> dict[str, Row]:
    """Return the rows with the relative difference of their logged losses to fp32.

    Compared trials have the same micro-batch, accumulation and workers, which decide what dropout
    draws. A trial without such a partner gets the largest difference of its precision elsewhere.
    """
    succeeded = [t for t in trials if rows.get(t.unit.key, {}).get("status") == "succeeded"]
    exact = {(t.parity, *t.cut): t for t in succeeded if t.precision == "fp32"}
    others = [trial for trial in succeeded if trial.precision != "fp32"]
    found: dict[str, float] = {}
    of_precision: dict[tuple[str, str], float] = {}
    for trial in others:
        if (partner := exact.get((trial.parity, *trial.cut))) is not None:
            reference = _losses(context, partner.unit.key)
            difference = _losses(context, trial.unit.key) - reference
            parity = float(np.linalg.norm(difference) / np.linalg.norm(reference))
            found[trial.unit.key] = parity
            kind = trial.parity, trial.precision
            of_precision[kind] = max(parity, of_precision.get(kind, 0.0))
    for trial in others:
        if (known := of_precision.get((trial.parity, trial.precision))) is not None:
            found.setdefault(trial.unit.key, known)
    return {key: {**rows[key], "parity": parity} for key, parity in found.items()}


def _losses(context: StageContext, trial_id: str) -> pd.Series[float]:
    steps = results.read_partition(context.run_dir, "steps", trial_id)
    return steps.set_index("step")["loss"].astype(float)
