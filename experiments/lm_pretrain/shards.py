"""Token shards, little-endian files that are mapped into memory, and the stage that writes them.

A folder holds ``train-00000.bin``, ``held_out-00000.bin`` and so on, the tokenizer, and an index.
The index is written last: a folder without one is incomplete.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.common.blocks import SPLITS, Split, evenly_spread, map_blocks
from experiments.lm_pretrain.data import read_texts
from experiments.lm_pretrain.tokenizer import (
    Ids,
    Kind,
    TextTokenizer,
    chunks,
    encode_chunk,
    make_tokenizer,
)
from raypipe import Cache, ConfigError, RunDirectory, StageContext, fingerprint

#: tokens per shard, except for the last one
SHARD = 2**24
TOKENIZER = "tokenizer.json"
_INDEX = "tokens.json"


class DamagedError(ConfigError):
    """Stored tokens are missing, truncated or changed."""


@dataclass(frozen=True)
class Index:
    """Content of a folder of tokens.

    Attributes:
        kind: the unit of text that is one token.
        vocabulary: number of different tokens that the tokenizer has.
        dtype: of the shards, ``<u2`` or ``<u4``.
        shard: tokens per shard.
        tokens: number of tokens of each split.
        bytes: size of the UTF-8 text of each split.
        sha256: checksum of each file.

    """

    kind: Kind
    vocabulary: int
    dtype: str
    shard: int
    tokens: Mapping[Split, int]
    bytes: Mapping[Split, int]
    sha256: Mapping[str, str]

    @property
    def bits_per_nat(self) -> float:
        """The bits per byte of held-out text of a loss of one nat per token."""
        return self.tokens["held_out"] / self.bytes["held_out"] / math.log(2)

    def measures(self, nats: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Return the measures of methods from their losses in nats per held-out token."""
        return {
            method: {
                "loss": float(loss),
                "perplexity": math.exp(loss),
                "bits_per_byte": float(loss * self.bits_per_nat),
            }
            for method, loss in nats.items()
        }


@dataclass(frozen=True)
class TokenFolder:
    """A folder of tokens in a run directory or in the cache; cheap to pickle."""

    place: RunDirectory
    folder: str

    def index(self) -> Index:
        """Return the index. Raises DamagedError if it is missing or damaged."""
        try:
            return Index(**json.loads(self.place.read(f"{self.folder}/{_INDEX}")))
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(_INDEX, error) from error

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer. Raises DamagedError."""
        return TextTokenizer(self.index().kind, self._read(TOKENIZER).decode())

    def maps(self, split: Split) -> list[NDArray[Any]]:
        """Return the shards of a split; on a mounted file system they are mapped, not read.

        Raises:
            DamagedError: a shard is missing or has another length.

        """
        index = self.index()
        left = index.tokens[split]
        mapped: list[NDArray[Any]] = []
        while left > 0:
            name = shard_name(split, len(mapped))
            path, expected = f"{self.folder}/{name}", min(left, index.shard)
            try:
                shard: NDArray[Any] = (
                    np.memmap(path, index.dtype, mode="r")
                    if self.place.is_local
                    else np.frombuffer(self.place.read(path), index.dtype)
                )
            except (OSError, ValueError) as error:
                raise self._damaged(name, error) from error
            if len(shard) != expected:
                raise self._damaged(name, f"{len(shard)} tokens instead of {expected}")
            mapped.append(shard)
            left -= expected
        return mapped

    def check(self) -> None:
        """Compare every file with its checksum. Raises DamagedError."""
        for _ in self._files():
            pass

    def copy_to(self, other: TokenFolder) -> None:
        """Copy all files, and check them. Raises DamagedError; OSError if a write fails."""
        for name, content in self._files():
            other.write(name, content)
        other.write_index(self.index())

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the folder atomically."""
        self.place.write(f"{self.folder}/{name}", content)

    def write_index(self, index: Index) -> None:
        """Write the index; call it after all files are written."""
        self.write(_INDEX, json.dumps(asdict(index), indent=1).encode())

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of every file. Raises DamagedError."""
        for name, checksum in self.index().sha256.items():
            content = self._read(name)
            if hashlib.sha256(content).hexdigest() != checksum:
                raise self._damaged(name, "another checksum than in the index")
            yield name, content

    def _read(self, name: str) -> bytes:
        try:
            return self.place.read(f"{self.folder}/{name}")
        except OSError as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, reason: object) -> DamagedError:
        return DamagedError(
            f"{self.folder}/{name}: the tokens are missing or damaged ({reason}); run the "
            "configuration in another run directory"
        )


@dataclass
class ShardWriter:
    """Writer of one split: it collects tokens and writes them shard by shard."""

    folder: TokenFolder
    split: Split
    dtype: str
    tokens: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    _waiting: list[Ids] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        """Append tokens."""
        self._waiting.append(ids)
        self.tokens += len(ids)
        while (whole := self.tokens - SHARD * len(self.sha256)) >= SHARD:
            joined = np.concatenate(self._waiting)
            self._write(joined[:SHARD])
            self._waiting = [joined[SHARD:]] if whole > SHARD else []

    def close(self) -> None:
        """Write the last, shorter shard."""
        if self._waiting:
            self._write(np.concatenate(self._waiting))
            self._waiting = []

    def _write(self, ids: Ids) -> None:
        content, name = ids.astype(self.dtype).tobytes(), shard_name(self.split, len(self.sha256))
        self.folder.write(name, content)
        self.sha256[name] = hashlib.sha256(content).hexdigest()


def tokens_between(shards: Sequence[NDArray[Any]], start: int, end: int) -> NDArray[Any]:
    """Return the tokens ``[start, end)``, at least one, of the shards of a split."""
    size = len(shards[0])
    parts = [
        shards[number][max(0, start - number * size) : end - number * size]
        for number in range(start // size, (end - 1) // size + 1)
    ]
    return np.concatenate(parts)


def shard_name(split: Split, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{number:05d}.bin"


def run_folder(run_dir: RunDirectory) -> TokenFolder:
    """Return the folder of a run's tokens."""
    return TokenFolder(run_dir, run_dir.artifact("tokenize"))


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
    checksums = {TOKENIZER: hashlib.sha256(content).hexdigest()}
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
    # the modules that decide the tokens
    parts = (map_blocks, read_texts, make_tokenizer, _cache_folder)
    code = [Path(inspect.getfile(part)).read_text() for part in parts]
    code += [f"tokenizers {version('tokenizers')}"]
    key = fingerprint([unit.fingerprint, code])
    place = RunDirectory.at(Cache.directory() / "tokens" / key)
    return TokenFolder(place, place.path())
