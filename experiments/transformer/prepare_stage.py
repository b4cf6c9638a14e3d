"""Prepare stage: train the tokenizer and encode both splits in the form the model takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import pyarrow as pa
import pyarrow.compute as pc

from experiments.transformer.data.splits import Data, SplitName
from experiments.transformer.data.tables import Column, encode_rows
from raypipe.datasets.bpe import token_lists, train_bpe
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.launcher import PoolOptions
from raypipe.storage.artifacts import write_arrow
from raypipe.storage.run_directory import RunDirectory

#: rows per task
_BLOCK = 4096
#: texts that the tokenizer is trained on, spread evenly over the corpus
_TRAINED_ON = 50_000


class Block(NamedTuple):
    """A task's part of a split."""

    split: SplitName
    start: int


def split_path(run_dir: RunDirectory, name: SplitName) -> str:
    """Return the path of a split's file: its inputs as the model takes them, and ``target``."""
    return run_dir.artifact("prepare", f"{name}.arrow")


def run_prepare(data: Data, context: StageContext) -> None:
    """Train the tokenizer on the training texts; encode both splits in blocks and store them."""
    run_dir, length, tokenizer = context.run_dir, context.settings.model.length, None
    for note in data.notes:
        context.say(note)
    if "text" in data.train.inputs.column_names:
        texts = data.train.inputs["text"]
        step = -(-len(texts) // _TRAINED_ON)
        sample = texts.take(pa.array(range(0, len(texts), step))).to_pylist()
        arguments = (sample, data.vocabulary, length)
        tokenizer = context.call("prepare/tokenizer", train_bpe, *arguments)
        run_dir.write(run_dir.artifact("prepare", "tokenizer.json"), tokenizer.encode())
    names: tuple[SplitName, ...] = get_args(SplitName)
    sizes = {name: len(data.split(name).target) for name in names}
    context.begin(sum(sizes.values()))
    done = 0

    def calls() -> Iterator[tuple[Block, Any, Any, Any, Any, Any]]:
        for name in names:
            for start in range(0, sizes[name], _BLOCK):
                rows = data.split(name).inputs.slice(start, _BLOCK).combine_chunks()
                yield Block(name, start), encode, data.columns, tokenizer, length, rows

    blocks: dict[SplitName, list[pa.Table]] = {name: [] for name in names}
    with context.pool(PoolOptions()) as pool:
        for block, rows in context.map(pool, calls()):
            blocks[block.split].append(rows)
            done += len(rows)
            context.advance(done)
    for name, parts in blocks.items():
        target = pa.array(data.split(name).target)
        table = pa.concat_tables(parts).append_column("target", target)
        write_arrow(run_dir, split_path(run_dir, name), table.combine_chunks())
    classes = f", {len(data.target.classes)} classes" if data.target.classes else ""
    context.say(f"{sizes['train']} rows to train on, {sizes['test']} to evaluate on{classes}")


def encode(
    columns: tuple[Column, ...], tokenizer: str | None, length: int, rows: pa.Table
) -> pa.Table:
    """Task: encode a block of inputs as the model takes them; cut sequences at ``length``."""
    if columns:
        return encode_rows(columns, rows)
    if tokenizer is not None:
        return pa.table({"tokens": token_lists(tokenizer, rows["text"].to_pylist())})
    cut = pc.list_slice(rows["tokens"], 0, length)
    return pa.table({"tokens": cut.cast(pa.list_(pa.int32()))})
