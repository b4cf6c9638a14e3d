"""Integrations with other tools: trackers, and PABBO for Optuna and Ray Tune."""
