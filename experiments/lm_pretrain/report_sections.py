"""Section of the report on a language model: whether its gain over n-grams may be chance."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from experiments.common.certainty import gain_sentence
from experiments.lm_pretrain.mixture import MODELS
from raypipe.report.plots import rows
from raypipe.report.sections import Section


def sections(tables: Mapping[str, pd.DataFrame]) -> list[Section]:
    """Return the sentence for the first screen; all tables have their own sections."""
    return [Section("Gain", [], certainty=_gain(tables))]


def _gain(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return the gain of the model over the n-grams of its tokens, with its interval."""
    found = rows(tables, "gains")
    if found is None:
        return []
    own = found[found["method"].isin(MODELS) & np.isfinite(found["gain_low"].astype(float))]
    if own.empty:
        return []
    row = max(own.to_dict("records"), key=lambda row: float(row["gain"]))
    gain, low, high = (float(row[name]) for name in ("gain", "gain_low", "gain_high"))
    data, metric = (
        f"{int(row['tokens'])} held-out tokens",
        "the language model's loss in bits per byte",
    )
    return [gain_sentence(data, metric, str(row["baseline"]), (gain, low, high), "lower")]
