"""Data of the transformer trainer: splits from tables, texts, token ids or the built-in corpus."""
