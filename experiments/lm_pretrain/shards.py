"""Token shards: little-endian files of equal length that are mapped into memory.

A folder holds ``train-00000.bin``, ``held_out-00000.bin`` and so on, the tokenizer, and an index.
The index is written last: a folder without one is incomplete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.common.blocks import Split
from experiments.lm_pretrain.tokenizer import Ids, Kind, TextTokenizer
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory

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
