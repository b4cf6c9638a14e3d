"""Training of the surrogate (:mod:`raypipe.surrogate`) on synthetic functions."""
