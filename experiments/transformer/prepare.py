"""Prepare stage: train the tokenizer, find the n-grams, and encode the splits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from experiments.common.blocks import PARTS, Block, Part, evenly_spread, map_blocks, text_hashes
from experiments.common.tokenizer import store_tokenizer, token_lists, train_bpe
from experiments.transformer.data import Column, Splits, encode_rows
from experiments.transformer.settings import NgramSettings
from raypipe import RunDirectory, StageContext, artifacts

_WORD = re.compile(r"\w+")
#: texts of which repeated n-grams are counted together
_AT_ONCE = 1024


def ngram_keys(text: str, settings: NgramSettings) -> NDArray[np.uint64]:
    """Return a hash of each n-gram of a text, with repetitions; the same on every platform.

    The text is its words in lower case. N-grams of bytes are those of the words with a space
    before, between and after them.
    """
    words = _WORD.findall(text.lower())
    hashes = text_hashes(words)
    parts = []
    key = np.zeros_like(hashes)
    for length in range(1, settings.words + 1):
        key = _mixed(key[: len(words) - length + 1] + hashes[length - 1 :])
        parts.append(key)
    shortest, longest = settings.bytes or (1, 0)
    data = np.frombuffer(f" {' '.join(words)} ".encode(), np.uint8).astype(np.uint64)
    for length in range(shortest, longest + 1):  # a number holds up to 7 bytes and the length
        packed = np.full(max(0, len(data) - length + 1), length << 56, np.uint64)
        for place in range(length):
            packed |= data[place : place + len(packed)] << np.uint64(8 * place)
        parts.append(_mixed(packed))
    return np.concatenate(parts)


def known_ngrams(texts: Sequence[str], settings: NgramSettings) -> pa.Table:
    """Task: return the n-grams of training texts that the model knows, ordered by ``key``.

    They are those that occur in two texts or more; of these, the ``settings.most`` that occur in
    the most texts. ``idf`` is log((1 + texts) / (1 + texts with the n-gram)) + 1, as in
    scikit-learn.
    """
    keys, counts = np.empty(0, np.uint64), np.empty(0, np.int64)
    for start in range(0, len(texts), _AT_ONCE):
        parts = [np.unique(ngram_keys(text, settings)) for text in texts[start : start + _AT_ONCE]]
        own, found = np.unique(np.concatenate(parts), return_counts=True)
        keys, inverse = np.unique(np.concatenate((keys, own)), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate((counts, found))).astype(np.int64)
    repeated = np.flatnonzero(counts > 1)
    frequent = np.argsort(-counts[repeated], kind="stable")[: settings.most]
    kept = np.sort(repeated[frequent])
    idf = np.log((1 + len(texts)) / (1 + counts[kept])) + 1
    return pa.table({"key": keys[kept], "idf": idf.astype(np.float32)})


def encode_ngrams(
    texts: Sequence[str], known: pa.Table, settings: NgramSettings
) -> dict[str, pa.Array]:
    """Return the known n-grams of each text: ``ngrams``, counted from 1, and ``weights``.

    A weight is (1 + log count) idf; those of a text have a sum of squares of 1. A text without a
    known n-gram has the n-gram 0 with the weight 0.
    """
    keys, idf = known["key"].to_numpy(), known["idf"].to_numpy()
    rows = list(_rows(texts, keys, idf, settings))
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids, _ in rows]))).astype(np.int32)
    columns = (np.concatenate(column) for column in zip(*rows, strict=True))
    lists = (pa.ListArray.from_arrays(offsets, pa.array(column)) for column in columns)
    return dict(zip(("ngrams", "weights"), lists, strict=True))


def _rows(
    texts: Sequence[str],
    keys: NDArray[np.uint64],
    idf: NDArray[np.float32],
    settings: NgramSettings,
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    for text in texts:
        own, counts = np.unique(ngram_keys(text, settings), return_counts=True)
        places = np.searchsorted(keys, own)
        places[places == len(keys)] = 0
        known = keys[places] == own if len(keys) else np.zeros(len(own), bool)
        ids, weights = places[known], (1 + np.log(counts[known])) * idf[places[known]]
        if len(ids):
            weights /= np.linalg.norm(weights)
            yield (1 + ids).astype(np.int32), weights.astype(np.float32)
        else:
            yield np.zeros(1, np.int32), np.zeros(1, np.float32)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the values after the bijection of SplitMix64 (Steele et al. 2014, figure 17)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


#: rows per task
_BLOCK = 4096
#: texts that the tokenizer is trained on at most
_TRAINED_ON = 50_000


def split_path(run_dir: RunDirectory, split: Part) -> str:
    """Return the path of a split: its inputs as the model takes them, and ``target``."""
    return run_dir.artifact("prepare", f"{split}.arrow")


def ngrams_path(run_dir: RunDirectory) -> str:
    """Return the path of the n-grams that the model knows: ``key`` and ``idf``."""
    return run_dir.artifact("prepare", "ngrams.parquet")


def run_prepare(data: Splits, ngrams: NgramSettings | None, context: StageContext) -> None:
    """Train the tokenizer and find n-grams on the training texts; encode and store the splits."""
    tokenizer, known = None, None
    for note in data.notes:
        context.say(note)
    splits = {part: rows for part in PARTS if len((rows := data.split(part)).target)}
    if not data.columns:
        texts = splits["train"].inputs["text"]
        spread = evenly_spread(range(len(texts)), _TRAINED_ON)
        sample = texts.take(pa.array(spread)).to_pylist()
        length = context.settings.model.length
        tokenizer = store_tokenizer(context, train_bpe, sample, data.vocabulary, length)
        if ngrams is not None:
            known = context.call("prepare/ngrams", known_ngrams, sample, ngrams)
            artifacts.write_parquet(context.run_dir, ngrams_path(context.run_dir), known)
            context.say(f"{len(known)} n-grams known")
    sizes = {split: len(rows.target) for split, rows in splits.items()}

    def call(block: Block[Any]) -> tuple[Any, ...]:
        part = splits[block.split].inputs.slice(block.start, block.end - block.start)
        return encode, data.columns, tokenizer, part.combine_chunks(), known, ngrams

    blocks: dict[str, list[pa.Table]] = {split: [] for split in splits}
    for block, inputs in map_blocks(context, sizes, _BLOCK, call):
        blocks[block.split].append(inputs)
    for split, rows in splits.items():
        target = pa.array(rows.target)
        table = pa.concat_tables(blocks[split]).append_column("target", target)
        artifacts.write_arrow(
            context.run_dir, split_path(context.run_dir, split), table.combine_chunks()
        )
    classes = f", {len(data.target.classes)} classes" if data.target.classes else ""
    choosing = f", {sizes['validation']} to choose the step" if "validation" in sizes else ""
    held_out = f"{sizes['held_out']} held out{classes}"
    context.say(f"{sizes['train']} rows to train on{choosing}, {held_out}")


def encode(
    columns: tuple[Column, ...],
    tokenizer: str | None,
    rows: pa.Table,
    known: pa.Table | None = None,
    ngrams: NgramSettings | None = None,
) -> pa.Table:
    """Task: encode a block of inputs as the model takes them, without a tokenizer of a table."""
    if tokenizer is None:
        return encode_rows(columns, rows)
    texts = rows["text"].to_pylist()
    tokens = {"tokens": token_lists(tokenizer, texts)}
    if known is None or ngrams is None:
        return pa.table(tokens)
    return pa.table(tokens | encode_ngrams(texts, known, ngrams))
