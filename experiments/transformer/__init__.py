"""The transformer trainer: a classifier or regressor of tables and of sequences."""
