"""The contenders of benchmarks.training: the same training, written five ways."""
