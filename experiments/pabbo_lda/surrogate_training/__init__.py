"""Training of the surrogate (:mod:`experiments.pabbo_lda.surrogate`) on synthetic functions."""
