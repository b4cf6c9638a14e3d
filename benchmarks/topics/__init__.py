"""Benchmark of optimizers on topic-number search; see docs/benchmark.md."""
