"""Figures and the report page, made from the tables of a run and nothing else."""
