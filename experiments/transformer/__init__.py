"""Transformer trainer: classification and regression of table rows and sequences."""
