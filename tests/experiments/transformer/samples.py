"""Tiny files to train on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd

ROWS = 120


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


def write(folder: Path, rows: pd.DataFrame, suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        rows.to_parquet(path)
    elif suffix == ".npz":
        np.savez(path, **{name: rows[name].to_numpy() for name in rows.columns})
    else:
        rows.to_csv(path, index=False)
    return path


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
