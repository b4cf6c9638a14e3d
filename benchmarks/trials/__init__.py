"""The contenders of benchmarks.sweep: the same trials, run two ways."""
