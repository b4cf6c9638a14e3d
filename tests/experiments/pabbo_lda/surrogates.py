"""Stand-in for the surrogate that ships, of a few lines."""

from __future__ import annotations

import numpy as np


class Nearest:
    """Expects at a point the value of the nearest known one, and more the farther that is."""

    def __init__(self):
        self.known = self.values = None

    def expected_improvement(self, known, values, candidates):
        assert known.shape == (len(values), candidates.shape[1])
        assert np.isfinite(values).all()
        assert (np.abs(known) <= 1).all()
        assert (np.abs(candidates) <= 1).all()
        self.known, self.values = known, values
        distances = np.linalg.norm(candidates[:, None] - known[None], axis=2)
        unit = np.ptp(values) or 1.0
        return distances.min(axis=1) * unit - values[distances.argmin(axis=1)]
