"""Tokens on disk: little-endian files of equal length that are mapped into memory.

A folder holds ``train-00000.bin``, ``held_out-00000.bin`` and so on, the tokenizer, and an index of
all of them, which is written last: a folder without one is not complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from experiments.lm_pretrain.tokenizer import Ids, Kind, TextTokenizer
from raypipe.errors import ConfigError
from raypipe.storage.run_directory import RunDirectory

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)

#: tokens of every shard but the last
SHARD = 2**24
TOKENIZER = "tokenizer.json"
_INDEX = "tokens.json"


class DamagedError(ConfigError):
    """Stored tokens that are missing, truncated or changed."""


@dataclass(frozen=True)
class Index:
    """What a folder holds.

    Attributes:
        kind: what a token is.
        vocabulary: how many different ones the tokenizer has.
        dtype: of the shards, ``<u2`` or ``<u4``.
        shard: tokens of a shard.
        tokens: how many each split has.
        bytes: of the UTF-8 text of each.
        sha256: of each file.

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
    """A folder of tokens, in a run directory or in the cache; cheap to pickle."""

    place: RunDirectory
    folder: str

    def index(self) -> Index:
        """What is there. Raises DamagedError: nothing, or no index."""
        try:
            return Index(**json.loads(self.place.read(f"{self.folder}/{_INDEX}")))
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(_INDEX, error) from error

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer. Raises DamagedError."""
        return TextTokenizer(self.index().kind, self._read(TOKENIZER).decode())

    def maps(self, split: Split) -> list[NDArray[Any]]:
        """The shards of a split, on a mounted file system mapped and not read.

        Raises:
            DamagedError: one is missing or has another length.

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
        """Copy everything, checked on the way. Raises DamagedError; OSError: not to be written."""
        for name, content in self._files():
            other.write(name, content)
        other.write_index(self.index())

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the folder, all or nothing."""
        self.place.write(f"{self.folder}/{name}", content)

    def write_index(self, index: Index) -> None:
        """Write the index, after all files."""
        self.write(_INDEX, json.dumps(asdict(index), indent=1).encode())

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """Every file's name and content. Raises DamagedError."""
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
    """Writes the tokens of one split as they come, shard by shard, in 2 or 4 bytes each."""

    folder: TokenFolder
    split: Split
    dtype: str
    tokens: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    _held: list[Ids] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        """Add tokens to the end."""
        self._held.append(ids)
        self.tokens += len(ids)
        while (whole := self.tokens - SHARD * len(self.sha256)) >= SHARD:
            joined = np.concatenate(self._held)
            self._write(joined[:SHARD])
            self._held = [joined[SHARD:]] if whole > SHARD else []

    def close(self) -> None:
        """Write what is left."""
        if self._held:
            self._write(np.concatenate(self._held))
            self._held = []

    def _write(self, ids: Ids) -> None:
        content, name = ids.astype(self.dtype).tobytes(), shard_name(self.split, len(self.sha256))
        self.folder.write(name, content)
        self.sha256[name] = hashlib.sha256(content).hexdigest()


def shard_name(split: Split, number: int) -> str:
    """The file of a shard."""
    return f"{split}-{number:05d}.bin"


def run_folder(run: RunDirectory) -> TokenFolder:
    """The tokens of a run."""
    return TokenFolder(run, run.artifact("tokenise"))
