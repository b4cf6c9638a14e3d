"""Sweeps: what to run on this machine, found by measuring."""
