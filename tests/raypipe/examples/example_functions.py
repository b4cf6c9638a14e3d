"""Functions that tests call in other processes."""

from __future__ import annotations


def power(base: float, exponent: int = 2, seed: int = 0) -> dict[str, float]:
    return {"result": base**exponent, "shifted": base + seed / 10}
