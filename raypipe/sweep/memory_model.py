"""Memory model: peak bytes = static + slope x micro-batch, refitted as trials end.

A model is of one group of trials: all that decides memory but the micro-batch is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from raypipe.hardware import bytes_text

# peaks scatter by a few MiB, the allocator's granularity, and about 1 %: proportionally to
# peak + this
_GRANULARITY = 400 * 2**20


@dataclass(frozen=True)
class Measurements:
    """Measurements of one group of trials: peak bytes, and micro-batches that ran out."""

    peaks: Mapping[int, int] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()

    @property
    def failed_micro_batch(self) -> int | None:
        """The smallest that ran out, of those no success at as large a one contradicts."""
        largest = max(self.peaks, default=0)
        return min((size for size in self.failed if size > largest), default=None)

    def corrected_by(self, newer: Measurements) -> Measurements:
        """These and newer ones, without what the newer ones contradict."""
        fits, fails = max(newer.peaks, default=0), newer.failed_micro_batch or math.inf
        peaks = {size: peak for size, peak in self.peaks.items() if size < fails}
        failed = frozenset(size for size in self.failed | newer.failed if size > fits)
        return Measurements(peaks | dict(newer.peaks), failed)


@dataclass(frozen=True)
class MemoryFit:
    """The line through the peaks: bytes at micro-batch 0 and for each sample more.

    It is fitted to ``trials`` trials, of each micro-batch the one that took the most, and off by
    ``largest_error`` of the peak at the worst of them.
    """

    static_bytes: float
    bytes_per_sample: float
    trials: int
    largest_error: float

    def predict(self, micro_batch: int) -> float:
        """Peak bytes of a trial."""
        return self.static_bytes + self.bytes_per_sample * micro_batch


@dataclass(frozen=True)
class Verdict:
    """Whether a micro-batch fits, why, and the peak bytes predicted for it, if anything is."""

    outcome: Literal["fits", "does_not_fit", "unknown"]
    reason: str
    predicted_bytes: float | None


class MemoryModel:
    """Memory model of a group on a device of ``capacity_bytes``; None if no limit is known.

    Within ``margin`` (a share) of the capacity a prediction decides nothing: such a micro-batch
    is worth a trial. ``preset`` is what earlier runs found; it gives way to what this one finds,
    whose order does not matter.

    Raises:
        ValueError: a capacity that is not above 0, or a margin outside [0, 1).

    """

    def __init__(
        self,
        capacity_bytes: int | None,
        margin: float = 0.05,
        preset: Measurements = Measurements(),
    ) -> None:
        if capacity_bytes is not None and not capacity_bytes > 0:
            raise ValueError(f"capacity_bytes = {capacity_bytes}: must be above 0, or None")
        if not 0 <= margin < 1:
            raise ValueError(f"margin = {margin}: must be at least 0 and below 1")
        self.capacity_bytes = capacity_bytes
        self.margin = margin
        self._preset = preset
        self._update(Measurements())

    def observe(self, micro_batch: int, peak_bytes: int) -> None:
        """A trial succeeded. Raises ValueError where a number is not above 0."""
        size, peak = _whole("micro_batch", micro_batch), _whole("peak_bytes", peak_bytes)
        peaks = {**self.measured.peaks, size: max(peak, self.measured.peaks.get(size, 0))}
        self._update(Measurements(peaks, self.measured.failed))

    def ran_out(self, micro_batch: int) -> None:
        """A trial ran out of memory. Raises ValueError where the micro-batch is not above 0."""
        failed = self.measured.failed | {_whole("micro_batch", micro_batch)}
        self._update(Measurements(self.measured.peaks, failed))

    def fit(self) -> MemoryFit | None:
        """The fit; None where fewer than two micro-batches were measured."""
        return self._fit

    def predict(self, micro_batch: int) -> float | None:
        """Peak bytes by the fit; None where there is none."""
        return self._fit.predict(micro_batch) if self._fit else None

    @property
    def failed_micro_batch(self) -> int | None:
        """The smallest that ran out of memory and that nothing contradicts."""
        return self._known.failed_micro_batch

    @property
    def limit_bytes(self) -> float | None:
        """The capacity, or the prediction at which a trial ran out where that is below it."""
        if self.capacity_bytes is None or self._fit is None or self.failed_micro_batch is None:
            return self.capacity_bytes
        return min(self.capacity_bytes, self._fit.predict(self.failed_micro_batch))

    def verdict(self, micro_batch: int) -> Verdict:
        """Whether a trial would fit: by what was measured, else by the fit.

        A micro-batch that ran out of memory in an earlier run is ruled out by the fit alone, and
        rules out only larger ones: what made it fail may have passed.
        """
        _whole("micro_batch", micro_batch)
        predicted = self.predict(micro_batch)
        fitted = min((size for size in self._known.peaks if size >= micro_batch), default=None)
        if fitted is not None:
            return Verdict("fits", f"micro-batch {fitted} with the same settings fits", predicted)
        failed = self.failed_micro_batch
        if failed is not None:
            earlier = failed not in self.measured.failed
            if micro_batch > failed or (micro_batch == failed and not earlier):
                reason = f"micro-batch {failed} with the same settings ran out of memory"
                reason += " in an earlier run" if earlier else ""
                return Verdict("does_not_fit", reason, predicted)
        limit = self.limit_bytes
        if self._fit is None or predicted is None:
            return Verdict("unknown", "fewer than two micro-batches were measured", None)
        if limit is None:
            return Verdict("unknown", "the capacity is not known", predicted)
        reason = (
            f"predicted {bytes_text(predicted)} of {bytes_text(limit)}: "
            f"{bytes_text(self._fit.static_bytes)} + {bytes_text(self._fit.bytes_per_sample)} "
            f"a sample (fit to {self._fit.trials} trials)"
        )
        if predicted > limit * (1 + self.margin):
            return Verdict("does_not_fit", reason, predicted)
        if predicted < limit * (1 - self.margin):
            return Verdict("fits", reason, predicted)
        return Verdict("unknown", reason, predicted)

    def largest_micro_batch(self) -> int | None:
        """The largest that is predicted or known to fit.

        None without a fit or a capacity, or where nothing bounds it.
        """
        limit = self.limit_bytes
        if self._fit is None or limit is None:
            return None
        room, slope = limit - self._fit.static_bytes, self._fit.bytes_per_sample
        bound = math.floor(room / slope) if slope else math.inf if room >= 0 else 0
        if self.failed_micro_batch is not None:
            bound = min(bound, self.failed_micro_batch - 1)
        largest = max(bound, *self._known.peaks)
        return int(largest) if math.isfinite(largest) else None

    def _update(self, measured: Measurements) -> None:
        #: what this run found, without the preset
        self.measured = measured
        self._known = self._preset.corrected_by(measured)
        self._fit = _fitted(self._known.peaks)


def _whole(name: str, value: int) -> int:
    if not 1 <= value < math.inf:
        raise ValueError(f"{name} = {value}: must be a whole number above 0")
    return int(value)


def _fitted(peaks: Mapping[int, int]) -> MemoryFit | None:
    """Least squares of the errors relative to the scatter, neither coefficient below 0."""
    if len(peaks) < 2:
        return None
    sizes, measured = np.array(sorted(peaks.items()), dtype=np.float64).T
    weights = 1 / (measured + _GRANULARITY)
    design = np.stack([np.ones_like(sizes), sizes / sizes.max()], axis=1)
    # in units of the largest peak and micro-batch: numbers near 1
    weights, unit = weights / weights.max(), measured.max()
    (static, slope), _ = nnls(weights[:, None] * design, weights * measured / unit)
    static, slope = float(static * unit), float(slope * unit / sizes.max())
    errors = np.abs(static + slope * sizes - measured) / measured
    return MemoryFit(static, slope, len(peaks), float(errors.max()))
