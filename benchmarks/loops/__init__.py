"""Contenders of ``benchmarks.gpu``: the same training, written four ways."""
