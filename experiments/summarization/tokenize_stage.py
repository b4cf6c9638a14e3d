"""The tokenize stage: the splits as tokens in Arrow files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from experiments.common.blocks import PARTS, Block, Part, map_blocks
from experiments.common.tokenizer import evenly_spread, read_tokenizer, store_tokenizer
from experiments.summarization.data import load
from experiments.summarization.tokenizer import (
    Encoded,
    Lengths,
    SubwordTokenizer,
    encode_pairs,
    make_tokenizer,
)
from raypipe.graph.context import StageContext
from raypipe.store.artifacts import write_arrow
from raypipe.store.run_directory import RunDirectory

#: documents per task
_BLOCK = 256
#: documents that the tokenizer is trained on at most, with their summaries
_TRAINED_ON = 50_000


def pairs_path(run_dir: RunDirectory, split: Part) -> str:
    """Return the path of a split: ``source`` and ``target``, a row per summary."""
    return run_dir.artifact("tokenize", f"{split}.arrow")


def documents_path(run_dir: RunDirectory) -> str:
    """Return the path of the held-out documents: ``source``, ``text`` and ``references``."""
    return run_dir.artifact("tokenize", "documents.arrow")


def tokenizer_of(run_dir: RunDirectory) -> SubwordTokenizer:
    """Return the tokenizer of a run. Raises ConfigError if it is missing."""
    return SubwordTokenizer(read_tokenizer(run_dir))


def run_tokenize(context: StageContext) -> None:
    """Make the tokenizer, encode the splits block by block, and store them."""
    settings, run_dir = context.settings.data, context.run_dir
    lengths = Lengths(settings.source_length, settings.target_length)
    data = load(settings)
    for note in data.notes:
        context.say(note)
    rows = evenly_spread(range(len(data.train)), _TRAINED_ON)
    texts = [data.train.documents[row] for row in rows]
    texts += [text for row in rows for text in data.train.summaries[row]]
    model = context.settings.model
    content = store_tokenizer(context, make_tokenizer, texts, model.vocabulary, model.pretrained)
    splits = {split: pairs for split in PARTS if len(pairs := getattr(data, split))}

    def call(block: Block[Part]) -> tuple[Any, ...]:
        pairs, part = splits[block.split], slice(block.start, block.end)
        tokenizer = SubwordTokenizer(content)
        texts = pairs.documents[part], pairs.summaries[part]
        return encode_pairs, tokenizer, settings.prefix, lengths, *texts

    blocks: dict[Part, list[Encoded]] = {split: [] for split in splits}
    sizes = {split: len(pairs) for split, pairs in splits.items()}
    for block, encoded in map_blocks(context, sizes, _BLOCK, call):
        blocks[block.split].append(encoded)
    for split, parts in blocks.items():
        pairs = pa.concat_tables(part.pairs for part in parts).combine_chunks()
        write_arrow(run_dir, pairs_path(run_dir, split), pairs)
        sources = sum(part.cut_sources for part in parts)
        targets = sum(part.cut_targets for part in parts)
        context.say(
            f"{split}: {sizes[split]} documents, of which {sources} are cut at {lengths.source} "
            f"tokens, and {len(pairs)} summaries, of which {targets} are cut at {lengths.target}"
        )
    documents = pa.concat_tables(part.documents for part in blocks["held_out"]).combine_chunks()
    write_arrow(run_dir, documents_path(run_dir), documents)
