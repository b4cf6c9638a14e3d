"""The sentence of the first screen on a gain: its interval, and whether it may be chance."""

from __future__ import annotations

from raypipe.report.formatting import number


def gain_sentence(
    data: str, metric: str, baseline: str, interval: tuple[float, float, float], better: str
) -> str:
    """Return how far a model is from a baseline on held-out data, in one sentence.

    Args:
        data: what was measured on, such as ``5000 held-out tokens``.
        metric: whose, such as ``the summarizer's ROUGE-2``.
        baseline: its name.
        interval: the gain, which is positive where the model is better, and its 95 % limits.
        better: ``lower`` or ``higher``.

    """
    gain, low, high = interval
    judged = "more than chance" if low * high > 0 else "it may be chance"
    side = "above" if (gain > 0) == (better == "higher") else "below"
    return (
        f"Over the {data}, {metric} is {number(abs(gain))} {side} that of {baseline} "
        f"(95 % interval of the gain {number(low)} to {number(high)}): {judged}."
    )
