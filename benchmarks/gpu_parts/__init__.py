"""Parts of ``benchmarks.gpu``: everything that waits for a GPU, in order of value."""
