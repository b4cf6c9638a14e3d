"""The stage between the files and the training: both splits as the model takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pyarrow as pa
import pyarrow.compute as pc

from experiments.transformer.data import Data, SplitName
from experiments.transformer.tables import Column, encode_rows
from raypipe.datasets.bpe import token_lists, train_bpe
from raypipe.pipeline.context import Call, StageContext
from raypipe.pipeline.launcher import PoolOptions
from raypipe.storage.artifacts import write_arrow
from raypipe.storage.run_directory import RunDirectory

#: rows a task
_BLOCK = 4096
#: texts that the tokenizer is trained on, evenly spread
_TRAINED_ON = 50_000


def split_path(run: RunDirectory, name: SplitName) -> str:
    """The file of a split: ``tokens``, or ``numeric`` and ``categories``; and ``target``."""
    return run.artifact("prepare", f"{name}.arrow")


def prepare(context: StageContext, data: Data, length: int) -> None:
    """Train the tokenizer on the training texts, encode both splits block by block, store them."""
    run, tokenizer = context.run_dir, None
    for note in data.notes:
        context.say(note)
    if "text" in data.train.inputs.column_names:
        texts = data.train.inputs["text"]
        step = -(-len(texts) // _TRAINED_ON)
        sample = texts.take(pa.array(range(0, len(texts), step))).to_pylist()
        arguments = (sample, data.vocabulary, length)
        tokenizer = context.call("prepare/tokenizer", train_bpe, *arguments)
        run.write(run.artifact("prepare", "tokenizer.json"), tokenizer.encode())
    names: tuple[SplitName, ...] = get_args(SplitName)
    sizes = {name: len(data.split(name).target) for name in names}
    context.begin(sum(sizes.values()))
    done = 0

    def calls() -> Iterator[Call]:
        for name in names:
            for start in range(0, sizes[name], _BLOCK):
                part = data.split(name).inputs.slice(start, _BLOCK).combine_chunks()
                yield f"prepare/{name}/{start}", encode, data.columns, tokenizer, length, part

    parts: dict[SplitName, dict[int, pa.Table]] = {name: {} for name in names}
    with context.pool(PoolOptions()) as pool:
        for key, part in context.map(pool, calls()):
            _, split, start = key.split("/")
            parts[split][int(start)] = part  # type: ignore[index]
            done += len(part)
            context.advance(done)
    for name, blocks in parts.items():
        table = pa.concat_tables(blocks[start] for start in sorted(blocks))
        target = pa.array(data.split(name).target)
        write_arrow(
            run, split_path(run, name), table.append_column("target", target).combine_chunks()
        )
    classes = f", {len(data.target.classes)} classes" if data.target.classes else ""
    context.say(f"{sizes['train']} rows to train on, {sizes['test']} to evaluate on{classes}")


def encode(
    columns: tuple[Column, ...], tokenizer: str | None, length: int, rows: pa.Table
) -> pa.Table:
    """The task: a block of inputs as the model takes them; sequences are cut at ``length``."""
    if columns:
        return encode_rows(columns, rows)
    if tokenizer is not None:
        return pa.table({"tokens": token_lists(tokenizer, rows["text"].to_pylist())})
    cut = pc.list_slice(rows["tokens"], 0, length)
    return pa.table({"tokens": cut.cast(pa.list_(pa.int32()))})
