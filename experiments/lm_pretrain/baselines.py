"""Baselines of a language model: n-grams of bytes and of tokens, and a general compressor."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.common.blocks import SPLITS, Split
from experiments.common.evaluation import measure_rows
from experiments.lm_pretrain.shards import TokenFolder, run_folder, tokens_between
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from experiments.lm_pretrain.training import validation_tokens
from raypipe import RunDirectory, StageContext

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


#: tokens at the end of the training text that are counted, and at the start of the held-out text
#: that are predicted
_COUNTED, _PREDICTED = 2**24, 2**23


def store_token_ngrams(run_dir: RunDirectory, validation_share: float) -> None:
    """Task: store the log-probabilities of the held-out tokens and of the validation part's tokens.

    The n-grams of the held-out text are counted in the whole training text. For the validation
    part, at its start, they are counted in the rest of it.
    """
    folder = run_folder(run_dir)
    index = folder.index()
    train, held_out = (folder.maps(split) for split in SPLITS)
    total, validation = index.tokens["train"], validation_tokens(folder, validation_share)
    seen = tokens_between(train, max(0, total - _COUNTED), total)
    test = tokens_between(held_out, 0, min(index.tokens["held_out"], _PREDICTED))
    _write(run_dir, "held_out", kneser_ney(seen, test, index.vocabulary))
    if 0 < validation < total:
        seen = tokens_between(train, max(validation, total - _COUNTED), total)
        test = tokens_between(train, 0, validation)
        _write(run_dir, "train", kneser_ney(seen, test, index.vocabulary))


def token_log_probabilities(
    run_dir: RunDirectory, split: Split, start: int, end: int
) -> NDArray[np.float64]:
    """Return the stored log-probabilities of the tokens ``[start, end)`` of a split, in nats.

    NaN where there are none: after the validation part, and at the end of a long held-out text.
    """
    found: NDArray[np.float32] = np.load(io.BytesIO(run_dir.read(_path(run_dir, split))))
    values = np.full(end - start, np.nan)
    known = found[start:end]
    values[: len(known)] = known
    return values


def _write(run_dir: RunDirectory, split: Split, probabilities: NDArray[np.float64]) -> None:
    content = io.BytesIO()
    np.save(content, np.log(probabilities).astype(np.float32))
    run_dir.write(_path(run_dir, split), content.getvalue())


def _path(run_dir: RunDirectory, split: Split) -> str:
    return run_dir.artifact("baselines", f"{split}.npy")


#: bytes at the end of the training text, and at the start of the held-out text, that they read
_TRAINED_ON, _TESTED_ON = 2**24, 2**23
#: tokens that are decoded at a time
_AT_ONCE = 2**18
#: what an end of a text is to the baselines; UTF-8 never has it
END_BYTE = b"\xff"
_XZ = lzma.PRESET_EXTREME | 9


def run_baselines(context: StageContext) -> None:
    """Record the measures of the baselines on the bytes of the held-out text.

    The probabilities of its tokens under n-grams of tokens are stored for the stage ``evaluate``,
    which measures them on the tokens that the language model predicts.
    """
    share = context.settings.data.validation_share
    context.call("baselines/tokens", store_token_ngrams, context.run_dir, share)
    index = run_folder(context.run_dir).index()
    bits: dict[str, float] = context.call("baselines/bytes", baseline_bits, context.run_dir)
    nats = {method: value / index.bits_per_nat for method, value in bits.items()}
    rows = measure_rows(context, {"tokens": index.tokens["held_out"]}, index.measures(nats))
    context.ledger.put("measures", {name: {**row, "weight": 0.0} for name, row in rows.items()})


def baseline_bits(run_dir: RunDirectory) -> dict[str, float]:
    """Task: return the bits per byte of text of each baseline on the held-out text.

    An end of a text is one more byte to predict, as it is one more token for the language model.
    """
    folder = run_folder(run_dir)
    test = b"".join(_taken(_parts(folder, "held_out"), _TESTED_ON))[:_TESTED_ON]
    last = [*_taken(_parts(folder, "train", reverse=True), _TRAINED_ON)]
    train = b"".join(reversed(last))[-_TRAINED_ON:]
    ends = test.count(END_BYTE)
    share = len(test) / max(1, len(test) - ends)  # bytes to predict, per byte of text
    train_bytes, test_bytes = (np.frombuffer(text, np.uint8) for text in (train, test))
    likely = kneser_ney(train_bytes, test_bytes, 256)
    bits = {"kneser-ney": float(-np.log2(likely).mean()), "xz": compressed_bits(train, test)}
    return {method: value * share for method, value in bits.items()}


def compressed_bits(train: bytes, test: bytes) -> float:
    """Return the bits per byte that xz needs for a text after the training text.

    It also learns from the text itself while it compresses it.
    """
    alone, both = (len(lzma.compress(text, preset=_XZ)) for text in (train, train + test))
    return 8 * (both - alone) / len(test)


def _taken(parts: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Yield parts until they have at least ``most`` bytes together."""
    total = 0
    for part in parts:
        yield part
        total += len(part)
        if total >= most:
            return


def _parts(folder: TokenFolder, split: Split, *, reverse: bool = False) -> Iterator[bytes]:
    """Yield the text of a split part by part, from its start or from its end."""
    tokenizer, shards = folder.tokenizer(), folder.maps(split)
    step = -1 if reverse else 1
    for shard in shards[::step]:
        for start in range(0, len(shard), _AT_ONCE)[::step]:
            tokens = shard[start : start + _AT_ONCE]
            ends = np.flatnonzero(tokens == END_OF_TEXT)
            texts = np.split(tokens, ends)  # each but the first begins with its end of text
            yield END_BYTE.join(tokenizer.decode(text).encode() for text in texts)
