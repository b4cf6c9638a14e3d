"""The perplexity of a topic model, looked up."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest

from experiments.pabbo_lda.objective.tabular import TabularObjective

TABLE = pd.DataFrame(
    [("a", 1, 40, 1e8), ("a", 1, 10, 100.0), ("a", 1, 2, 400.0), ("b", 2, 5, 7.0)],
    columns=["dataset", "seed", "T", "perplexity"],
)


def test_table_returns_recorded_values_and_interpolates_between_them():
    objective = TabularObjective(TABLE)
    assert objective.runs == (("a", 1), ("b", 2))
    assert objective.value("a", 1, 10) == 100.0
    assert objective.value("a", 1, 20) == pytest.approx(1e5)  # halfway in log T and in log value
    assert objective.value("a", 1, 1000) == pytest.approx(1e8)
    assert objective.best("a", 1) == (10, 100.0)


def test_table_refuses_what_it_cannot_answer():
    objective = TabularObjective(TABLE)
    with pytest.raises(ValueError, match="'a', seed 2"):
        objective.value("a", 2, 10)
    with pytest.raises(ValueError, match="perplexity"):
        TabularObjective(TABLE.drop(columns="perplexity"))
    with pytest.raises(ValueError, match="not positive"):
        TabularObjective(TABLE.assign(perplexity=0.0))
    with pytest.raises(ValueError, match="a perplexity that is not a number"):
        TabularObjective(TABLE.assign(perplexity="1,234.5"))


def test_table_reads_the_published_layout(tmp_path: Path):
    path = tmp_path / "evaluations.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(
            "dataset,run_id,seed,T,perplexity,seen_by\n20news,0,42,2,1871.2338458807023,GA\n"
        )
    assert TabularObjective.read(path).value("20news", 42, 2) == 1871.2338458807023
