"""The stage between the texts and the training: both splits as tokens, in the run directory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

import pyarrow as pa

from experiments.summarization.pairs import Data, Pairs
from experiments.summarization.tokens import (
    Encoded,
    Lengths,
    TextTokenizer,
    encode_pairs,
    make_tokenizer,
)
from raypipe.errors import ConfigError
from raypipe.pipeline.context import Call, StageContext
from raypipe.pipeline.launcher import PoolOptions
from raypipe.storage.artifacts import write_arrow
from raypipe.storage.run_directory import RunDirectory

if TYPE_CHECKING:  # the settings import torch
    from experiments.summarization.settings import DataSettings, ModelSettings

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)

#: documents a task
_BLOCK = 256
#: documents that the tokenizer is trained on, evenly spread
_TRAINED_ON = 50_000


def pairs_path(run: RunDirectory, split: Split) -> str:
    """The file of a split: ``source`` and ``target``, a row a summary."""
    return run.artifact("tokenise", f"{split}.arrow")


def documents_path(run: RunDirectory) -> str:
    """The file of the held-out documents: ``source``, ``text`` and ``references``."""
    return run.artifact("tokenise", "documents.arrow")


def _tokenizer_path(run: RunDirectory) -> str:
    return run.artifact("tokenise", "tokenizer.json")


def tokenise(
    context: StageContext, data: Data, settings: DataSettings, model: ModelSettings
) -> None:
    """Make the tokenizer, encode both splits block by block, store them."""
    for note in data.notes:
        context.say(note)
    tokenizer = context.call(
        "tokenise/tokenizer",
        make_tokenizer,
        _sample(data.train),
        model.vocabulary,
        model.pretrained,
    )
    context.run_dir.write(_tokenizer_path(context.run_dir), tokenizer.content.encode())
    parts = _encoded(context, tokenizer, data, settings)
    lengths = Lengths(settings.source_length, settings.target_length)
    for split, pairs in zip(SPLITS, (data.train, data.held_out), strict=True):
        encoded = parts[split]
        table = pa.concat_tables(part.pairs for part in encoded).combine_chunks()
        write_arrow(context.run_dir, pairs_path(context.run_dir, split), table)
        cut = [sum(part.cut_sources for part in encoded), sum(part.cut_targets for part in encoded)]
        context.say(
            f"{split}: {len(pairs)} documents, of which {cut[0]} are cut at {lengths.source} "
            f"tokens, and {len(table)} summaries, of which {cut[1]} are cut at {lengths.target}"
        )
    documents = pa.concat_tables(part.documents for part in parts["held_out"]).combine_chunks()
    write_arrow(context.run_dir, documents_path(context.run_dir), documents)


def tokenizer_of(run: RunDirectory) -> TextTokenizer:
    """The tokenizer of a run. Raises ConfigError: it is missing."""
    path = _tokenizer_path(run)
    try:
        return TextTokenizer(run.read(path).decode())
    except OSError as error:
        raise ConfigError(
            f"{path}: a stage's result is missing ({error}); run the configuration in another run "
            "directory"
        ) from error


def _encoded(
    context: StageContext, tokenizer: TextTokenizer, data: Data, settings: DataSettings
) -> dict[Split, list[Encoded]]:
    """The blocks of each split, in order."""
    splits = dict(zip(SPLITS, (data.train, data.held_out), strict=True))
    lengths = Lengths(settings.source_length, settings.target_length)
    found: dict[Split, dict[int, Encoded]] = {split: {} for split in SPLITS}
    context.begin(sum(len(pairs) for pairs in splits.values()))
    done = 0

    def calls() -> Iterator[Call]:
        for split, pairs in splits.items():
            for start in range(0, len(pairs), _BLOCK):
                end = start + _BLOCK
                texts = pairs.documents[start:end], pairs.summaries[start:end]
                arguments = (tokenizer, settings.prefix, lengths, *texts)
                yield f"tokenise/{split}/{start}", encode_pairs, *arguments

    with context.pool(PoolOptions()) as pool:
        for key, part in context.map(pool, calls()):
            _, split, start = key.split("/")
            found[split][int(start)] = part  # type: ignore[index]
            done += len(part.documents)
            context.advance(done)
    return {split: [parts[start] for start in sorted(parts)] for split, parts in found.items()}


def _sample(pairs: Pairs) -> list[str]:
    """Documents evenly spread, and their summaries."""
    step = -(-len(pairs) // _TRAINED_ON)
    summaries = [text for each in pairs.summaries[::step] for text in each]
    return [*pairs.documents[::step], *summaries]
