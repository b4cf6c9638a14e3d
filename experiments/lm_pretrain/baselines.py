"""Baselines of a language model on the bytes of a text: n-grams, and a general compressor."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator

import numpy as np

from experiments.common.blocks import Split
from experiments.common.evaluation import measure_rows
from experiments.lm_pretrain.kneser_ney import kneser_ney
from experiments.lm_pretrain.shards import TokenFolder, run_folder
from experiments.lm_pretrain.token_ngrams import store_token_ngrams
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from raypipe.graph.context import StageContext
from raypipe.store.run_directory import RunDirectory

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
    context.call(
        "baselines/tokens",
        store_token_ngrams,
        context.run_dir,
        context.settings.data.validation_share,
    )
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
    for row in rows.values():
        row["weight"] = 0.0
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


def kneser_ney_bits(train: bytes, test: bytes, order: int | None = None) -> float:
    """Return the cross-entropy of a text in bits per byte under an n-gram model of its bytes.

    See :func:`~experiments.lm_pretrain.kneser_ney.kneser_ney`.
    """
    seen, text = (np.frombuffer(part, np.uint8) for part in (train, test))
    return float(-np.log2(kneser_ney(seen, text, 256, order)).mean())


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
