"""Trainings of a sweep, and of a matrix: raypipe's overhead per training against Ray Tune."""
