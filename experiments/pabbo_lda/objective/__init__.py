"""Objectives that the studies minimize over the number of topics."""
