"""Benchmarks of raypipe's overhead with units that do almost nothing."""
