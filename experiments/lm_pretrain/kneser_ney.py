"""Interpolated n-gram models with modified Kneser-Ney smoothing, of bytes or of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: highest order
ORDER = 7
#: bits of the integer that holds an n-gram
_BITS = 64

Codes = NDArray[np.uint64]
Symbols = NDArray[np.unsignedinteger[Any]]


def order_of(vocabulary: int) -> int:
    """Return the order of the model for a number of different symbols: 7, or what 64 bits hold."""
    return min(ORDER, _BITS // _width(vocabulary))


def kneser_ney(
    train: Symbols, test: Symbols, vocabulary: int, order: int | None = None
) -> NDArray[np.float64]:
    """Return the probability of each symbol of a text, which follows the training text: ``[n]``.

    The model is interpolated, with modified Kneser-Ney smoothing (Chen and Goodman 1999, "An
    empirical study of smoothing techniques for language modeling", section 3): three discounts per
    order, and below the highest order the number of different symbols before an n-gram instead of
    its count. Below order 1 each symbol has 1 / ``vocabulary``.

    Args:
        train: the symbols to count, at least one.
        test: the symbols to predict, each from those before it.
        vocabulary: number of different symbols; all are below it.
        order: highest order, 1 or more; :func:`order_of` if not given.

    """
    width = _width(vocabulary)
    order = min(order_of(vocabulary) if order is None else order, len(train))
    before = order - 1
    text = np.concatenate([train[len(train) - before :], test])
    probability = np.full(len(test), 1 / vocabulary)
    for size in range(1, order + 1):
        if size == order:
            codes = _codes(train, order, width)
        else:
            last = np.uint64((1 << (width * size)) - 1)
            codes = np.unique(_codes(train, size + 1, width)) & last
        grams = _codes(text[before - size + 1 :], size, width)
        probability = _NgramOrder.of(codes, width).interpolated(grams, probability)
    return probability


@dataclass(frozen=True)
class _NgramOrder:
    """One order of the model: its n-grams and their contexts, both sorted.

    Attributes:
        width: bits per symbol.
        grams: n-grams as integers.
        shares: their discounted shares of the counts of their contexts.
        contexts: the n-grams without their last symbol.
        left: the share of each context that its discounts leave to the order below.

    """

    width: int
    grams: Codes
    shares: NDArray[np.float64]
    contexts: Codes
    left: NDArray[np.float64]

    @classmethod
    def of(cls, codes: Codes, width: int) -> _NgramOrder:
        """Return the level of n-grams, each as often as it counts."""
        grams, counts = np.unique(codes, return_counts=True)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        contexts, starts = np.unique(grams >> np.uint64(width), return_index=True)
        totals = np.add.reduceat(counts, starts)
        sizes = np.diff([*starts, len(grams)])
        shares = (counts - discounts) / np.repeat(totals, sizes)
        return cls(width, grams, shares, contexts, np.add.reduceat(discounts, starts) / totals)

    def interpolated(self, grams: Codes, below: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probabilities of the last symbols of n-grams, given those one order below."""
        place, known = _places(self.contexts, grams >> np.uint64(self.width))
        found, seen = _places(self.grams, grams)
        own = np.where(seen, self.shares[found], 0.0)
        return np.where(known, own + self.left[place] * below, below)


def _places(values: Codes, wanted: Codes) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where sorted values have the wanted ones, and whether they do."""
    place = np.searchsorted(values, wanted).clip(max=len(values) - 1)
    return place, values[place] == wanted


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the discounts of counts 0, 1, 2, and 3 or more; of few n-grams 0.5."""
    once, twice, thrice, four = (max(1, int((counts == number).sum())) for number in (1, 2, 3, 4))
    share = once / (once + 2 * twice)
    found = [
        1 - 2 * share * twice / once,
        2 - 3 * share * thrice / twice,
        3 - 4 * share * four / thrice,
    ]
    return np.array([0.0, *(min(max(d, 0.05), n - 0.05) for n, d in enumerate(found, 1))])


def _codes(text: Symbols, size: int, width: int) -> Codes:
    """Return each n-gram of ``size`` symbols as an integer, its first one the most significant."""
    number = max(0, len(text) - size + 1)
    codes = np.zeros(number, np.uint64)
    for place in range(size):
        codes = (codes << np.uint64(width)) | text[place : place + number]
    return codes


def _width(vocabulary: int) -> int:
    """Return the number of bits of a symbol."""
    return max(1, (vocabulary - 1).bit_length())
