"""Tiny files to read and to train on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROWS = 120


def write_text(path: Path, content: str) -> Path:
    """Write a text, compressed if the suffix says so."""
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_rows(path: Path, rows: pd.DataFrame | Sequence[dict[str, Any]]) -> Path:
    """Write the table that the suffix names: JSON lines, CSV, or Parquet in groups of few rows."""
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path, row_group_size=3)
    elif ".csv" in path.suffixes:
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def frame(rows: int = ROWS) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    numbers = 3 + 2 * draw.standard_normal(rows)
    return pd.DataFrame(
        {
            "size": numbers,
            "gap": np.where(draw.random(rows) < 0.2, np.nan, draw.random(rows)),
            "colour": draw.choice(["red", "green", "blue"], rows),
            "few": draw.integers(0, 4, rows),
            "many": np.arange(rows) * 10,
            "flag": draw.random(rows) < 0.5,
            "y": np.where(numbers > 3, "large", "small"),
            "price": 1000 + 50 * numbers,
        }
    )
