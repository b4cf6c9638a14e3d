"""The stage between the text and the training: everything as tokens, or those of another run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from experiments.lm_pretrain.shards import (
    SHARD,
    SPLITS,
    TOKENIZER,
    DamagedError,
    Index,
    ShardWriter,
    Split,
    TokenFolder,
    run_folder,
)
from experiments.lm_pretrain.text import Texts, read_texts
from experiments.lm_pretrain.tokenizer import (
    Ids,
    TextTokenizer,
    chunks,
    encode_chunk,
    make_tokenizer,
)
from raypipe.datasets.corpus import CorpusError
from raypipe.pipeline.context import Call, StageContext
from raypipe.pipeline.identity import fingerprint
from raypipe.pipeline.launcher import PoolOptions
from raypipe.storage.run_directory import RunDirectory, cache_directory

if TYPE_CHECKING:  # the settings import torch
    from experiments.lm_pretrain.settings import DataSettings

logger = logging.getLogger(__name__)

#: characters a task
CHUNK = 2**20
#: characters that a BPE is trained on at most, in chunks evenly spread
_TRAINED_ON = 2**27


def tokenise(
    context: StageContext,
    data: DataSettings,
    vocabulary: int,
    length: int,
    identity: Mapping[str, Any],
) -> None:
    """Store the tokens in the run directory: from the cache, or made anew and kept there.

    Args:
        context: of the stage.
        data: which text, and what a token is.
        vocabulary: tokens of a BPE at most.
        length: tokens that a sample predicts; both splits need one sample.
        identity: what decides the tokens.

    Raises:
        CorpusError: text that cannot be used, or is too short.
        UnitError: a character of the held-out text that the training text does not have.

    """
    target, cached = run_folder(context.run_dir), _cache_folder(identity)
    try:
        cached.copy_to(target)
        context.say(f"the tokens are those of an earlier run: {cached.folder}")
    except DamagedError as error:
        if cached.place.exists(cached.folder):
            logger.warning("%s; the text is tokenised anew", error)
        _make(context, target, data, vocabulary)
        try:
            target.copy_to(cached)
        except OSError as failure:
            logger.warning("%s: the tokens cannot be cached: %s", cached.folder, failure)
    index = target.index()
    for split in SPLITS:
        tokens, size = index.tokens[split], index.bytes[split]
        context.say(f"{split}: {tokens} tokens of {size} bytes, {size / tokens:.2f} bytes each")
        if tokens <= length:
            raise CorpusError(
                f"the {split} text has {tokens} tokens; a sample needs model.context + 1 = "
                f"{length + 1}: give more text or a shorter context"
            )


def _make(context: StageContext, target: TokenFolder, data: DataSettings, vocabulary: int) -> None:
    """Read the text, train the tokenizer on it and store the tokens."""
    texts = read_texts(data)
    training = texts.train
    if data.tokens == "bpe":
        training = _sample(training)
    tokenizer: TextTokenizer = context.call(
        "tokenise/tokenizer", make_tokenizer, data.tokens, training, vocabulary
    )
    context.say(f"{tokenizer.vocabulary} different tokens")
    dtype = "<u2" if tokenizer.vocabulary <= 2**16 else "<u4"
    writers = {split: ShardWriter(target, split, dtype) for split in SPLITS}
    for split, ids in _encoded(context, tokenizer, texts):
        writers[split].add(ids)
    for writer in writers.values():
        writer.close()
    content = tokenizer.content.encode()
    target.write(TOKENIZER, content)
    checksums = {TOKENIZER: sha256(content).hexdigest()}
    for writer in writers.values():
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


def _encoded(
    context: StageContext, tokenizer: TextTokenizer, texts: Texts
) -> Iterator[tuple[Split, Ids]]:
    """The tokens of each split in order; chunks that come early wait."""
    context.begin(sum(len(text) for part in texts for text in part))
    done = 0
    for split, documents in zip(SPLITS, texts, strict=True):
        parts = list(chunks(documents, CHUNK))
        calls: Iterator[Call] = (
            (f"tokenise/{split}/{number}", encode_chunk, tokenizer, part)
            for number, part in enumerate(parts)
        )
        early: dict[int, Ids] = {}
        following = 0
        with context.pool(PoolOptions()) as pool:
            for name, ids in context.map(pool, calls):
                number = int(name.rpartition("/")[2])
                early[number] = ids
                done += sum(len(piece) for piece in parts[number].pieces)
                context.advance(done)
                while following in early:
                    yield split, early.pop(following)
                    following += 1


def _sample(documents: Sequence[str]) -> list[str]:
    """The pieces of evenly spread chunks."""
    parts = list(chunks(documents, CHUNK))
    step = -(-sum(len(text) for text in documents) // _TRAINED_ON)
    return [piece for part in parts[::step] for piece in part.pieces]


def _bytes(documents: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def _cache_folder(identity: Mapping[str, Any]) -> TokenFolder:
    place = RunDirectory.at(cache_directory() / "tokens" / fingerprint(identity))
    return TokenFolder(place, place.path())
