"""Variational Bayes of the topic model, compiled: E-step, M-step and bound over word-major arrays.

The equations are those of Hoffman, Blei and Bach 2010 ("Online Learning for Latent Dirichlet
Allocation") in the order in which scikit-learn's ``_online_lda`` takes them, its constants too,
so that the values agree. They are fast because:

- ``exp(psi(x))``, which every iteration needs for each topic, has its own asymptotic series: one
  exponential, no logarithm, in loops that the compiler turns into vector instructions;
- arrays are word-major, so the topics of a word, or the words of a small document, are contiguous;
- a topic leaves the document's loop once its share cannot matter even as the only topic of a word:
  with a hundred topics or more, most leave after the first iterations.

Arrays: ``words`` [V, T] is exp(E[log beta]) (``float32`` halves the time spent in memory), every
other one ``float64``: ``topics`` [V, T] the parameter lambda of beta, ``gamma`` [N, T] that of
theta, ``stats`` [V, T] the expected counts over ``words``. Documents are the rows of a CSR matrix:
``counts``, ``ids`` (of the words), ``starts``; they are only read.

Importing the module compiles it, or loads the cached machine code; import it before measuring.
Every function has its signatures, so that both load the same machine code in the same order: else
the last digits would depend on whether the cache was empty.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, types

_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
# 1.5 * 2**52: added to a number it leaves the nearest integer in the lowest bits
_ROUNDING = 6755399441055744.0
_LEAST_EXPONENT, _BIAS, _FRACTION_BITS = -1021.0, 1023, 52
# scikit-learn adds it to a word's probability, in float32 as well
_EPSILON = 2.220446049250313e-16
# with fewer topics the loops run over the words of a document
_FEW = 16
# a topic leaves if its largest possible share is this part of the prior
_NEGLIGIBLE = 1e-10
# below it the probability of a word is summed in logarithms
_UNDERFLOW = 1e-280


def _read(kind: Any) -> Any:
    return types.Array(kind, 1, "C", readonly=True)


_vector, _matrix, _bits = float64[::1], float64[:, ::1], int64[:, ::1]
_documents = {kind: (_read(kind), _read(int32), _read(int32)) for kind in (float64, float32)}
_words = {kind: kind[:, ::1] for kind in (float64, float32)}
_SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities are kept


@njit(
    types.void(_vector, _vector, _matrix, _bits),
    cache=True,
    error_model="numpy",
    fastmath={"contract"},
)
def exp_digamma(x: Any, out: Any, work: Any, bits: Any) -> None:
    """Compute ``out = exp(psi(x))`` for ``x > 0``, to 1e-12 relative; 0 where it is below 1e-307.

    psi(x) = psi(x + 8) - sum_{i<8} 1/(x + i), and exp(psi(y + 1/2)) = y + 1/(24 y) - ... (Bernoulli
    numbers in the series of psi, exponentiated).

    Args:
        x: numbers, as many as ``out`` holds.
        out: receives the result.
        work: [3, at least as many], overwritten.
        bits: the same memory as integers.

    """
    exponent, rounded, series = work[0], work[1], work[2]
    for i in range(x.shape[0]):
        v = x[i]
        u = v * (v + 7.0)
        ab = u * (u + 6.0)
        cd = (u + 10.0) * (u + 12.0)
        total = (2.0 * v + 7.0) * ((2.0 * u + 6.0) * cd + (2.0 * u + 22.0) * ab) / (ab * cd)
        power = max(-total * _LOG2_E, _LEAST_EXPONENT)
        exponent[i] = power
        rounded[i] = power + _ROUNDING
        y = v + 7.5
        r = 1.0 / y
        q = r * r
        p = -5509121 / 1393459200 + q * (2709398569 / 367873228800)
        series[i] = y + r * (1 / 24 + q * (-37 / 5760 + q * (10313 / 2903040 + q * p)))
    for i in range(x.shape[0]):
        f = (exponent[i] - (rounded[i] - _ROUNDING)) * _LN_2
        p = 1 / 5040 + f * (1 / 40320 + f * (1 / 362880 + f * (1 / 3628800)))
        p = 1 / 6 + f * (1 / 24 + f * (1 / 120 + f * (1 / 720 + f * p)))
        series[i] *= 1.0 + f * (1.0 + f * (1 / 2 + f * p))
    for i in range(x.shape[0]):
        bits[1, i] = (bits[1, i] + _BIAS) << _FRACTION_BITS
    for i in range(x.shape[0]):
        out[i] = series[i] * rounded[i] if exponent[i] > _LEAST_EXPONENT else 0.0


@njit(float64(float64), cache=True, error_model="numpy")
def digamma(x: float) -> float:
    """Return psi(x) for x > 0, to 1e-12 relative or absolute."""
    total = 0.0
    while x < 8.0:
        total += 1.0 / x
        x += 1.0
    y = x - 0.5
    q = 1.0 / (y * y)
    p = 31 / 8064 + q * (-127 / 30720 + q * (511 / 67584))
    return math.log(y) + q * (1 / 24 + q * (-7 / 960 + q * p)) - total


@njit(
    [types.void(_vector, int64, _vector, _matrix, _bits, kind[::1]) for kind in _words],
    cache=True,
    error_model="numpy",
)
def _shares(now: Any, m: int, transformed: Any, work: Any, bits: Any, theta: Any) -> None:
    """Compute ``theta[k] = exp(psi(now[k]) - psi(now[m]))``, where ``now[m]`` is the sum."""
    exp_digamma(now[: m + 1], transformed, work, bits)
    if transformed[m] > 0.0:
        for k in range(m):
            theta[k] = transformed[k] / transformed[m]
    else:  # an empty document with a prior near 0
        for k in range(m):
            theta[k] = math.exp(digamma(now[k]) - digamma(now[m]))


@njit(
    [
        types.void(_words[kind], ids, _read(kind), kind[::1], int64, _vector)
        for kind in _words
        for ids in (int64[::1], _read(int32))
    ],
    cache=True,
    error_model="numpy",
    fastmath=_SUMS,
)
def _over_topics(rows: Any, ids: Any, counts: Any, theta: Any, m: int, out: Any) -> None:
    """Sum ``out[k] = sum_j counts[j] / probability[j] * rows[j, k]`` over a document's words."""
    for k in range(m):
        out[k] = 0.0
    for j in range(counts.shape[0]):
        row = rows[ids[j]]
        probability = 0.0
        for k in range(m):
            probability += theta[k] * row[k]
        ratio = counts[j] / (probability + _EPSILON)
        for k in range(m):
            out[k] += ratio * row[k]


@njit(
    [types.void(_words[kind], _read(kind), kind[::1], _vector, kind[::1]) for kind in _words],
    cache=True,
    error_model="numpy",
    fastmath=_SUMS,
)
def _over_words(columns: Any, counts: Any, theta: Any, out: Any, ratio: Any) -> None:
    """Compute the same sum from the topics' rows over the words of the document."""
    n = counts.shape[0]
    for j in range(n):
        ratio[j] = _EPSILON
    for k in range(theta.shape[0]):
        column, weight = columns[k], theta[k]
        for j in range(n):
            ratio[j] += weight * column[j]
    for j in range(n):
        ratio[j] = counts[j] / ratio[j]
    for k in range(theta.shape[0]):
        column = columns[k]
        total = 0.0
        for j in range(n):
            total += ratio[j] * column[j]
        out[k] = total


@njit(
    [
        types.void(*_documents[k], _words[k], _matrix, float64, int64, float64, _matrix)
        for k in (float64, float32)
    ],
    cache=True,
    error_model="numpy",
    fastmath=_SUMS,
)
def e_step(
    counts: Any,
    ids: Any,
    starts: Any,
    words: Any,
    gamma: Any,
    alpha: float,
    iterations: int,
    tolerance: float,
    stats: Any,
) -> None:
    """Fit ``gamma`` to the documents from its current values; add to ``stats`` unless it is empty.

    A document is iterated until the mean change of its ``gamma`` is below the tolerance.
    """
    documents, T = gamma.shape
    longest = 0
    for d in range(documents):
        longest = max(longest, starts[d + 1] - starts[d])
    few = T < _FEW
    work = np.empty((3, T + 1))
    bits = work.view(np.int64)
    # the last element is the sum over the topics, so that one call transforms both
    now, transformed, new = np.empty(T + 1), np.empty(T + 1), np.empty(T)
    theta = np.empty(T, words.dtype)
    alive = np.empty(T, np.int64)
    columns = np.empty((T if few else 0, longest), words.dtype)
    ratio = np.empty(longest, words.dtype)
    compact = np.empty((0 if few else longest, T), words.dtype)
    in_place = np.arange(longest)
    for d in range(documents):
        mine, count = ids[starts[d] : starts[d + 1]], counts[starts[d] : starts[d + 1]]
        m, is_compact = T, False
        total = 0.0
        for k in range(T):
            now[k] = gamma[d, k]
            total += now[k]
            alive[k] = k
        now[T] = total
        _shares(now, T, transformed, work, bits, theta)
        if few:
            for j in range(mine.shape[0]):
                row = words[mine[j]]
                for k in range(T):
                    columns[k, j] = row[k]
        # a word's ratio is at most its count over epsilon
        length = 0.0
        for j in range(mine.shape[0]):
            length += count[j]
        settling = 0.0  # the remaining change of the topics that have left
        least = _NEGLIGIBLE * alpha * _EPSILON / max(length, 1.0)
        for _ in range(iterations):
            if few:
                _over_words(columns, count, theta, new, ratio)
            elif is_compact:
                _over_topics(compact, in_place, count, theta, m, new)
            else:
                _over_topics(words, mine, count, theta, m, new)
            change, total, settling = settling, alpha * (T - m), 0.0
            for k in range(m):
                value = theta[k] * new[k] + alpha
                change += abs(value - now[k])
                now[k] = value
                total += value
            now[m] = total
            _shares(now, m, transformed, work, bits, theta)
            if change < tolerance * T:
                break
            if few:
                continue
            kept = 0
            for k in range(m):
                kept += theta[k] >= least
            if kept <= 0.75 * m:
                kept = 0
                for k in range(m):
                    if theta[k] >= least:
                        alive[kept], theta[kept], now[kept] = alive[k], theta[k], now[k]
                        kept += 1
                    else:
                        settling += abs(now[k] - alpha)
                m, is_compact = kept, True
                for j in range(mine.shape[0]):
                    row, to = words[mine[j]], compact[j]
                    for k in range(m):
                        to[k] = row[alive[k]]
        gamma[d] = alpha
        for k in range(m):
            gamma[d, alive[k]] = now[k]
        if stats.shape[0] == 0:
            continue
        for j in range(mine.shape[0]):
            row = compact[j] if is_compact else words[mine[j]]
            probability = 0.0
            for k in range(m):
                probability += theta[k] * row[k]
            share, to = count[j] / (probability + _EPSILON), stats[mine[j]]
            if is_compact:
                for k in range(m):
                    to[alive[k]] += theta[k] * share
            else:
                for k in range(m):
                    to[k] += theta[k] * share


@njit(
    [
        types.void(_matrix, _words[k], _matrix, float64, float64, float64)
        for k in (float64, float32)
    ],
    cache=True,
    error_model="numpy",
    fastmath={"contract"},
)
def m_step(topics: Any, words: Any, stats: Any, eta: float, weight: float, scale: float) -> None:
    """Move ``topics`` toward the expected counts ``stats``, and recompute ``words``.

    With weight 0, only ``words`` is recomputed from ``topics``.
    """
    V, T = topics.shape
    totals, transformed = np.zeros(T), np.empty(T)
    work = np.empty((3, T))
    bits = work.view(np.int64)
    for w in range(V):
        for k in range(T):
            value = eta + scale * stats[w, k] * words[w, k]
            value = topics[w, k] + weight * (value - topics[w, k])
            topics[w, k] = value
            totals[k] += value
    exp_digamma(totals, transformed, work, bits)
    inverse = 1.0 / transformed
    for w in range(V):
        exp_digamma(topics[w], transformed, work, bits)
        for k in range(T):
            words[w, k] = transformed[k] * inverse[k]


@njit(
    [
        float64(*_documents[k], _matrix, _words[k], _matrix, float64, float64)
        for k in (float64, float32)
    ],
    cache=True,
    error_model="numpy",
    fastmath=_SUMS,
)
def bound(
    counts: Any,
    ids: Any,
    starts: Any,
    topics: Any,
    words: Any,
    gamma: Any,
    alpha: float,
    eta: float,
) -> float:
    """Return the variational bound of the documents' log-likelihood, including the topics' part."""
    documents, T = gamma.shape
    V = topics.shape[0]
    score = 0.0
    psi_topics, totals = np.empty(T), np.zeros(T)
    for w in range(V):
        for k in range(T):
            totals[k] += topics[w, k]
    for k in range(T):
        psi_topics[k] = digamma(totals[k])
        score += math.lgamma(eta * V) - math.lgamma(totals[k])
    constant = math.lgamma(eta)
    for w in range(V):
        for k in range(T):
            value = topics[w, k]
            score += (eta - value) * (digamma(value) - psi_topics[k])
            score += math.lgamma(value) - constant
    constant = math.lgamma(alpha)
    theta, logs, now, transformed = np.empty(T), np.empty(T), np.empty(T + 1), np.empty(T + 1)
    work = np.empty((3, T + 1))
    bits = work.view(np.int64)
    for d in range(documents):
        total = 0.0
        for k in range(T):
            now[k] = gamma[d, k]
            total += now[k]
        now[T] = total
        psi_total = digamma(total)
        score += math.lgamma(alpha * T) - math.lgamma(total)
        _shares(now, T, transformed, work, bits, theta)
        for k in range(T):
            value = gamma[d, k]
            if value != alpha:  # else the term is 0
                score += (alpha - value) * (digamma(value) - psi_total)
                score += math.lgamma(value) - constant
        for j in range(starts[d], starts[d + 1]):
            row = words[ids[j]]
            probability = 0.0
            for k in range(T):
                probability += theta[k] * row[k]
            if probability > _UNDERFLOW:
                score += counts[j] * math.log(probability)
                continue
            largest = -math.inf
            for k in range(T):
                logs[k] = digamma(gamma[d, k]) - psi_total
                logs[k] += digamma(topics[ids[j], k]) - psi_topics[k]
                largest = max(largest, logs[k])
            rest = 0.0
            for k in range(T):
                rest += math.exp(logs[k] - largest)
            score += counts[j] * (largest + math.log(rest))
    return score
