"""Phase 4: what is trained on, and its labels."""

from __future__ import annotations

import pytest
from scipy import sparse

from experiments.teleclass.artifacts import (
    label_lists,
    pseudo_labels_path,
)
from experiments.teleclass.training_set import run_hierarchy
from raypipe.store.artifacts import read_parquet, write_parquet


def test_without_any_label_there_is_nothing_to_train_on(context, labeled):
    corpus, _ = labeled(0)
    table = read_parquet(context.run_dir, pseudo_labels_path(context.run_dir))
    none = label_lists(sparse.csr_matrix((10, 4), dtype=bool))
    table = table.set_column(1, "labels", none)
    write_parquet(context.run_dir, pseudo_labels_path(context.run_dir), table)
    with pytest.raises(ValueError, match="nothing to train on"):
        run_hierarchy(corpus, context)
