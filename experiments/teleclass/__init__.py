"""TELEClass: weakly supervised hierarchical multi-label text classification."""
