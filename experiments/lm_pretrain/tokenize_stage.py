"""The tokenize stage: token shards of both splits, from the cache or from the text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import sha256

from experiments.common.blocks import SPLITS, map_blocks
from experiments.common.tokenizer import evenly_spread
from experiments.lm_pretrain.data import read_texts
from experiments.lm_pretrain.shards import (
    SHARD,
    TOKENIZER,
    DamagedError,
    Index,
    ShardWriter,
    TokenFolder,
    run_folder,
)
from experiments.lm_pretrain.tokenizer import TextTokenizer, chunks, encode_chunk, make_tokenizer
from raypipe import __version__
from raypipe.graph.context import StageContext
from raypipe.graph.identity import fingerprint
from raypipe.graph.source import source_of
from raypipe.provenance import package_version
from raypipe.store.run_directory import RunDirectory, cache_directory

logger = logging.getLogger(__name__)

#: characters per task
CHUNK = 2**20
#: characters that a BPE is trained on at most, in chunks
_TRAINED_ON = 2**27


def run_tokenize(context: StageContext) -> None:
    """Store the tokens in the run directory; copy them from the cache, or to it.

    Raises:
        CorpusError: see :func:`~experiments.lm_pretrain.data.read_texts`.
        UnitError: the held-out text has a character that the training text does not have.

    """
    target, cached = run_folder(context.run_dir), _cache_folder(context)
    try:
        cached.copy_to(target)
        context.say(f"the tokens of an earlier run are used: {cached.folder}")
    except DamagedError as error:
        if cached.place.exists(cached.folder):
            logger.warning("%s; the text is tokenized again", error)
        _tokenize(context, target)
        try:
            target.copy_to(cached)
        except OSError as failure:
            logger.warning("%s: the tokens cannot be cached: %s", cached.folder, failure)
    index = target.index()
    for split in SPLITS:
        tokens, size = index.tokens[split], index.bytes[split]
        context.say(
            f"{split}: {tokens} tokens of {size} bytes, {size / tokens:.2f} bytes per token"
        )


def _tokenize(context: StageContext, target: TokenFolder) -> None:
    """Read the text, train the tokenizer, and store the tokens."""
    data, vocabulary = context.settings.data, 0
    texts = read_texts(data)
    parts = {split: list(chunks(getattr(texts, split), CHUNK)) for split in SPLITS}
    training = texts.train
    if data.tokens == "bpe":
        spread = evenly_spread(parts["train"], _TRAINED_ON // CHUNK)
        training = [piece for part in spread for piece in part.pieces]
        vocabulary = context.settings.model.vocabulary
    tokenizer: TextTokenizer = context.call(
        "tokenize/tokenizer", make_tokenizer, data.tokens, training, vocabulary
    )
    context.say(f"{tokenizer.vocabulary} different tokens")
    dtype = "<u2" if tokenizer.vocabulary <= 2**16 else "<u4"
    writers = {split: ShardWriter(target, split, dtype) for split in SPLITS}
    numbers = {split: len(of_split) for split, of_split in parts.items()}
    for block, ids in map_blocks(
        context, numbers, 1, lambda b: (encode_chunk, tokenizer, parts[b.split][b.start])
    ):
        writers[block.split].add(ids)
    content = tokenizer.content.encode()
    target.write(TOKENIZER, content)
    checksums = {TOKENIZER: sha256(content).hexdigest()}
    for writer in writers.values():
        writer.close()
        checksums |= writer.sha256
    target.write_index(
        Index(
            kind=tokenizer.kind,
            vocabulary=tokenizer.vocabulary,
            dtype=dtype,
            shard=SHARD,
            tokens={split: writer.tokens for split, writer in writers.items()},
            bytes={split: _bytes(getattr(texts, split)) for split in SPLITS},
            sha256=checksums,
        )
    )


def _bytes(documents: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def _cache_folder(context: StageContext) -> TokenFolder:
    """Return the folder of these tokens in the cache: by identity, code and libraries."""
    (unit,) = context.stage.units
    code = [source_of(__name__).fingerprint, __version__, package_version("tokenizers")]
    key = fingerprint([unit.fingerprint, code])
    place = RunDirectory.at(cache_directory() / "tokens" / key)
    return TokenFolder(place, place.path())
