"""Baselines of a language model on the bytes of a text: n-grams, and a general compressor."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.common.blocks import Split
from experiments.common.evaluation import measure_rows
from experiments.lm_pretrain.shards import TokenFolder, run_folder
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from raypipe.pipeline.context import StageContext
from raypipe.storage.run_directory import RunDirectory

#: bytes of an n-gram, at most 8, which a 64-bit integer holds
ORDER = 7
#: bytes at the end of the training text, and at the start of the held-out text, that they read
_TRAINED_ON, _TESTED_ON = 2**24, 2**23
#: tokens that are decoded at a time
_AT_ONCE = 2**18
#: what an end of a text is to the baselines; UTF-8 never has it
END_BYTE = b"\xff"
_XZ = lzma.PRESET_EXTREME | 9

Codes = NDArray[np.uint64]


def run_baselines(context: StageContext) -> None:
    """Record the measures of the baselines on the bytes of the held-out text."""
    index = run_folder(context.run_dir).index()
    bits: dict[str, float] = context.call("baselines/bytes", baseline_bits, context.run_dir)
    bytes_per_token = index.bytes["held_out"] / index.tokens["held_out"]
    measures = {}
    for method, value in bits.items():
        loss = value * math.log(2) * bytes_per_token
        measures[method] = {
            "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": value
        }  # fmt: skip
    rows = measure_rows(context, {"tokens": index.tokens["held_out"]}, measures)
    context.ledger.put("measures", rows)


def baseline_bits(run_dir: RunDirectory) -> dict[str, float]:
    """Task: return the bits per byte of text of each baseline on the held-out text.

    An end of a text is one more byte to predict, as it is one more token for the language model.
    """
    folder = run_folder(run_dir)
    test = _start(folder, "held_out", _TESTED_ON)
    train = _end(folder, "train", _TRAINED_ON)
    ends = test.count(END_BYTE)
    share = len(test) / max(1, len(test) - ends)  # bytes to predict, per byte of text
    bits = {"kneser-ney": kneser_ney_bits(train, test), "xz": compressed_bits(train, test)}
    return {method: value * share for method, value in bits.items()}


def compressed_bits(train: bytes, test: bytes) -> float:
    """Return the bits per byte that xz needs for a text after the training text.

    It also learns from the text itself while it compresses it.
    """
    alone, both = (len(lzma.compress(text, preset=_XZ)) for text in (train, train + test))
    return 8 * (both - alone) / len(test)


def kneser_ney_bits(train: bytes, test: bytes, order: int = ORDER) -> float:
    """Return the cross-entropy of a text in bits per byte under an n-gram model of its bytes.

    The model is interpolated, with modified Kneser-Ney smoothing (Chen and Goodman 1999, "An
    empirical study of smoothing techniques for language modeling", section 3): three discounts per
    order, and below the highest order the number of different bytes before an n-gram instead of its
    count. Order 0 gives each byte 1/256.
    """
    order = min(order, len(train))
    seen = np.frombuffer(train, np.uint8)
    before = order - 1
    text = np.concatenate([seen[len(seen) - before :], np.frombuffer(test, np.uint8)])
    probability = np.full(len(test), 1 / 256)
    for size in range(1, order + 1):
        if size == order:
            codes = _codes(seen, order)
        else:
            codes = np.unique(_codes(seen, size + 1)) & np.uint64(256**size - 1)
        grams = _codes(text[before - size + 1 :], size)
        probability = _Level.of(codes).interpolated(grams, probability)
    return float(-np.log2(probability).mean())


@dataclass(frozen=True)
class _Level:
    """One order of the model: its n-grams and their contexts, both sorted.

    Attributes:
        grams: n-grams as integers.
        shares: their discounted shares of the counts of their contexts.
        contexts: the n-grams without their last byte.
        left: the share of each context that its discounts leave to the order below.

    """

    grams: Codes
    shares: NDArray[np.float64]
    contexts: Codes
    left: NDArray[np.float64]

    @classmethod
    def of(cls, codes: Codes) -> _Level:
        """Return the level of n-grams, each as often as it counts."""
        grams, counts = np.unique(codes, return_counts=True)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        contexts, starts = np.unique(grams >> np.uint64(8), return_index=True)
        totals = np.add.reduceat(counts, starts)
        sizes = np.diff([*starts, len(grams)])
        shares = (counts - discounts) / np.repeat(totals, sizes)
        return cls(grams, shares, contexts, np.add.reduceat(discounts, starts) / totals)

    def interpolated(self, grams: Codes, below: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probabilities of the last bytes of n-grams, given those of the order below."""
        place, known = _places(self.contexts, grams >> np.uint64(8))
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


def _codes(text: NDArray[np.uint8], size: int) -> Codes:
    """Return each n-gram of ``size`` bytes as an integer, its first byte the most significant."""
    number = max(0, len(text) - size + 1)
    codes = np.zeros(number, np.uint64)
    for place in range(size):
        codes = (codes << np.uint64(8)) | text[place : place + number]
    return codes


def _start(folder: TokenFolder, split: Split, most: int) -> bytes:
    """Return the first bytes of a split, at most ``most``."""
    text = bytearray()
    for part in _parts(folder, split, reverse=False):
        text += part
        if len(text) >= most:
            break
    return bytes(text[:most])


def _end(folder: TokenFolder, split: Split, most: int) -> bytes:
    """Return the last bytes of a split, at most ``most``."""
    parts: list[bytes] = []
    for part in _parts(folder, split, reverse=True):
        parts.append(part)
        if sum(map(len, parts)) >= most:
            break
    return b"".join(reversed(parts))[-most:]


def _parts(folder: TokenFolder, split: Split, *, reverse: bool) -> Iterator[bytes]:
    """Yield the text of a split part by part, from its start or from its end."""
    tokenizer, shards = folder.tokenizer(), folder.maps(split)
    step = -1 if reverse else 1
    for shard in shards[::step]:
        for start in range(0, len(shard), _AT_ONCE)[::step]:
            tokens = shard[start : start + _AT_ONCE]
            ends = np.flatnonzero(tokens == END_OF_TEXT)
            texts = np.split(tokens, ends)  # each but the first begins with its end of text
            yield END_BYTE.join(tokenizer.decode(text).encode() for text in texts)
