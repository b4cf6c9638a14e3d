"""TELEClass: weakly supervised hierarchical multi-label classification (Zhang et al., WWW 2025)."""
