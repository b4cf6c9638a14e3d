"""PABBO as a sampler of Optuna and as a search algorithm of Ray Tune."""
