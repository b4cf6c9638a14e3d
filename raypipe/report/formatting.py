"""Formatting of numbers, durations, sizes and column names for readers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from numbers import Integral, Real
from os.path import commonprefix

from raypipe.hardware import bytes_text

MISSING = "–"  # noqa: RUF001 - an en dash, as printed tables have it
#: the types of pd.NaT and pd.NA, without importing pandas
_MISSING_OF_PANDAS = ("NaTType", "NAType")
_THIN_SPACE = "\u202f"  # does not break a line
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: words of column names that readers know in another spelling
_WORDS = {
    "f1": "F1", "mae": "MAE", "mse": "MSE", "rmse": "RMSE", "mrr": "MRR", "r2": "R²", "mfu": "MFU",
    "rouge 1": "ROUGE-1", "rouge 2": "ROUGE-2", "rouge l": "ROUGE-L", "p value": "p",
    "p holm": "p (Holm)", "kendalls": "Kendall's W", "gpu": "GPU", "cpu": "CPU", "lr":
    "learning rate", "util": "utilization", "rss": "resident memory", "loss final": "training loss",
}  # fmt: skip
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b")


def number(value: float) -> str:
    """Return four significant digits, integers in full, a power of ten below 1e-3 and above 1e7."""
    if not math.isfinite(value):
        return MISSING if math.isnan(value) else ("∞" if value > 0 else "-∞")
    size = abs(value)
    if isinstance(value, Integral) and size < 1e15:
        return _grouped(f"{int(value)}")
    if value == 0:
        return "0"
    if 1e-3 <= size < 1e7:
        decimals = max(0, 3 - math.floor(math.log10(size)))
        text = f"{value:.{decimals}f}"
        return _grouped(text.rstrip("0").rstrip(".") if "." in text else text)
    return scientific(value, 3)


def percent(share: float) -> str:
    """Return a share in percent with two digits, whole above 10 %: ``0.12 %``, ``110 %``."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.2g} %"


def scientific(value: float, decimals: int = 1) -> str:
    """Return an exact power of ten as ``10⁵``, any other number with its digits: ``3.2·10⁴``."""
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    return power if mantissa == "1" else f"{mantissa}·{power}"


def plus_minus(mean: float, deviation: float) -> str:
    """Return ``1776 ± 186``: two digits of the deviation, the mean to the same place."""
    if not (math.isfinite(mean) and math.isfinite(deviation) and deviation > 0):
        tail = "" if math.isnan(deviation) else f" ± {number(deviation)}"
        return number(mean) + tail
    if max(abs(mean), deviation) >= 1e7 or deviation < 1e-4:
        return f"{scientific(mean)} ± {scientific(deviation)}"
    decimals = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{_grouped(f'{mean:.{decimals}f}')} ± {_grouped(f'{deviation:.{decimals}f}')}"


def with_interval(column: str, mean: float, half: float) -> str:
    """Return ``0.91 ± 0.02`` as a cell of a column, or the mean alone."""
    text = cell(column, mean)
    if not math.isfinite(half):
        return text
    return plus_minus(mean, half) if text == number(mean) else f"{text} ± {cell(column, half)}"


def listed(texts: Sequence[str]) -> str:
    """Return texts as a list in words: ``a, b and c``."""
    *first, last = texts or [""]
    return " and ".join(filter(None, [", ".join(first), last]))


def counted(count: int, noun: str) -> str:
    """Return a number of things: ``1 stage``, ``3 stages``."""
    return f"{number(count)} {noun}{'s' * (count != 1)}"


def _grouped(text: str) -> str:
    """Insert thin spaces between thousands, from five digits on."""
    digits = text.lstrip("-").split(".")[0]
    if len(digits) < 5:
        return text
    return text.replace(digits, f"{int(digits):,}".replace(",", _THIN_SPACE), 1)


def duration(seconds: float) -> str:
    """Return seconds in the two largest units: ``39.8 ms``, ``5 min 10 s``, ``2 h 35 min``."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def probability(p: float) -> str:
    """Return a p-value with its sign and two significant digits: ``= 0.013``, ``< 0.0001``."""
    if math.isnan(p):
        return MISSING
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"


def cell(column: str, value: object) -> str:
    """Return the text of a table cell; the column's name gives the unit (``_s``, ``_bytes``)."""
    if value is None or type(value).__name__ in _MISSING_OF_PANDAS:
        return MISSING
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    amount = int(value) if isinstance(value, Integral) else float(value)
    base = re.sub(r"_(mean|std|min|max|median)$", "", column)
    return next(write for suffix, write in _WRITERS.items() if base.endswith(suffix))(amount)


#: the formatter of a column by the end of its name
_WRITERS: dict[str, Callable[[float], str]] = {
    "_per_s": number,
    "_s": duration,
    "_bytes": lambda size: bytes_text(size) if math.isfinite(size) else number(size),
    "_j": lambda joules: f"{number(joules)} J",
    "power_w": lambda watts: f"{number(watts)} W",
    "util": lambda percent: f"{percent:.0f} %" if math.isfinite(percent) else MISSING,
    "p_value": lambda p: probability(p).removeprefix("= "),
    "p_holm": lambda p: probability(p).removeprefix("= "),
    "": number,
}


def heading(column: str) -> str:
    """Return a column's name for readers: without its unit, which the cells show.

    A dotted key is a name to copy, and stays as it is.
    """
    if "." in column:
        return column
    if column.startswith("eval_"):
        return f"held-out {heading(column.removeprefix('eval_'))}"
    base, statistic = column, ""
    if match := re.match(r"(.+)_(mean|std|min|max|median)$", column):
        base, statistic = match[1], f" ({match[2]})"
    base = re.sub(r"(?<!_per)_(s|bytes|w|j)$", "", base)
    return _WORD.sub(lambda word: _WORDS[word[1]], base.replace("_", " ")) + statistic


def with_unit(column: str, unit: str, better: str, group: str = "") -> str:
    """Return a column's heading with its group, the unit that cells do not show, and direction."""
    name, is_shown = heading(column), cell(column, 1.0) != number(1.0)  # such as of a duration
    words = [group, "" if is_shown or unit == name else unit, better and f"{better} is better"]
    text = ", ".join(filter(None, words))
    return f"{name} ({text})" if text else name


def short_labels(texts: Sequence[str], longest: int) -> list[str]:
    """Return texts cut to what a figure has room for; different ones stay different.

    Where one is too long, first the words go that all of them begin with.
    """
    shared = commonprefix(texts) if len(set(texts)) > 1 else ""  # noqa: RUF071 - of characters
    words = re.match(r".*[\W_]", shared)
    if words and max(map(len, texts)) > longest:
        texts = [f"…{text[words.end() :]}" for text in texts]
    for head in (longest - 1, longest // 2, 4):
        tail = longest - 1 - head
        cut = [t if len(t) <= longest else f"{t[:head]}…{t[len(t) - tail :]}" for t in texts]
        if len(set(cut)) == len(set(texts)):
            return cut
    return [f"{text[: longest - 5]}… {place + 1}" for place, text in enumerate(texts)]
