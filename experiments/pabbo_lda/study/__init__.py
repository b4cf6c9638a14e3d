"""Studies: one optimizer on one corpus, all of them concurrently, and their comparison."""
