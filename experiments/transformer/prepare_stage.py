"""Prepare stage: train the tokenizer, find the n-grams, and encode the splits."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from experiments.common.blocks import PARTS, Block, Part, map_blocks
from experiments.common.bpe import token_lists, train_bpe
from experiments.common.tokenizer import evenly_spread, store_tokenizer
from experiments.transformer.data.splits import Splits
from experiments.transformer.data.tables import Column, encode_rows
from experiments.transformer.ngrams import encode_ngrams, known_ngrams
from experiments.transformer.settings import NgramSettings
from raypipe.graph.context import StageContext
from raypipe.store.artifacts import write_arrow, write_parquet
from raypipe.store.run_directory import RunDirectory

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
    length, tokenizer, known = context.settings.model.length, None, None
    for note in data.notes:
        context.say(note)
    splits = {part: rows for part in PARTS if len((rows := data.split(part)).target)}
    if data.has_texts:
        texts = splits["train"].inputs["text"]
        spread = evenly_spread(range(len(texts)), _TRAINED_ON)
        sample = texts.take(pa.array(spread)).to_pylist()
        tokenizer = store_tokenizer(context, train_bpe, sample, data.vocabulary, length)
        if ngrams is not None:
            known = context.call("prepare/ngrams", known_ngrams, sample, ngrams)
            write_parquet(context.run_dir, ngrams_path(context.run_dir), known)
            context.say(f"{len(known)} n-grams known")
    sizes = {split: len(rows.target) for split, rows in splits.items()}

    def call(block: Block[Any]) -> tuple[Any, ...]:
        part = splits[block.split].inputs.slice(block.start, block.end - block.start)
        return encode, data.columns, tokenizer, length, part.combine_chunks(), known, ngrams

    blocks: dict[str, list[pa.Table]] = {split: [] for split in splits}
    for block, inputs in map_blocks(context, sizes, _BLOCK, call):
        blocks[block.split].append(inputs)
    for split, rows in splits.items():
        target = pa.array(rows.target)
        table = pa.concat_tables(blocks[split]).append_column("target", target)
        write_arrow(context.run_dir, split_path(context.run_dir, split), table.combine_chunks())
    classes = f", {len(data.target.classes)} classes" if data.target.classes else ""
    choosing = f", {sizes['validation']} to choose the step" if "validation" in sizes else ""
    held_out = f"{sizes['held_out']} held out{classes}"
    context.say(f"{sizes['train']} rows to train on{choosing}, {held_out}")


def encode(
    columns: tuple[Column, ...],
    tokenizer: str | None,
    length: int,
    rows: pa.Table,
    known: pa.Table | None = None,
    ngrams: NgramSettings | None = None,
) -> pa.Table:
    """Task: encode a block of inputs as the model takes them; cut sequences at ``length``."""
    if columns:
        return encode_rows(columns, rows)
    if tokenizer is not None:
        texts = rows["text"].to_pylist()
        tokens = {"tokens": token_lists(tokenizer, texts)}
        if known is None or ngrams is None:
            return pa.table(tokens)
        return pa.table(tokens | encode_ngrams(texts, known, ngrams))
    cut = pc.list_slice(rows["tokens"], 0, length)
    return pa.table({"tokens": cut.cast(pa.list_(pa.int32()))})
