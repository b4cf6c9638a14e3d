"""Phase 4: what is trained on, and its labels."""

from __future__ import annotations

import pytest
from scipy import sparse

from experiments.teleclass.artifacts import (
    label_lists,
    label_matrix,
    pseudo_labels_path,
    training_set_path,
)
from experiments.teleclass.training_set import run_hierarchy
from raypipe.store.artifacts import read_parquet, write_parquet


@pytest.mark.parametrize("written", [0, 3])
def test_the_training_set_has_all_ancestors(context, labeled, written):
    corpus, expected = labeled(written)
    run_hierarchy(corpus, context)
    table = read_parquet(context.run_dir, training_set_path(context.run_dir))
    labels = label_matrix(table.column("labels"), 4)
    assert [set(row.indices) for row in labels] == [classes for _, classes in expected]
    assert table.column("origin").to_pylist() == ["document"] * 6 + ["generated"] * written
    assert table.column("row").to_pylist() == [1, 2, 4, 5, 7, 8, *range(written)]


def test_without_any_label_there_is_nothing_to_train_on(context, labeled):
    corpus, _ = labeled(0)
    table = read_parquet(context.run_dir, pseudo_labels_path(context.run_dir))
    none = label_lists(sparse.csr_matrix((10, 4), dtype=bool))
    table = table.set_column(1, "labels", none)
    write_parquet(context.run_dir, pseudo_labels_path(context.run_dir), table)
    with pytest.raises(ValueError, match="nothing to train on"):
        run_hierarchy(corpus, context)
