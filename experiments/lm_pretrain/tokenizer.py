"""Text as tokens and back: a byte-level BPE, characters or bytes; token 0 ends a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from raypipe.datasets.bpe import train_bpe
from raypipe.errors import ConfigError

Kind = Literal["bpe", "characters", "bytes"]
Ids = NDArray[np.uint32]

#: the token between two documents, and how a BPE spells it
END_OF_TEXT = 0
END = "<|endoftext|>"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer by its kind and its content; cheap to pickle.

    Attributes:
        kind: what a token is.
        content: of ``bpe`` JSON of the library ``tokenizers``, of ``characters`` these, sorted.

    """

    kind: Kind
    content: str = ""

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens there are, the end of a text counted."""
        if self.kind == "bpe":
            return self._bpe.get_vocab_size()
        return 1 + (len(self.content) if self.kind == "characters" else 256)

    def encode(self, text: str) -> Ids:
        """The tokens of a text, the end of it left out.

        Raises:
            ConfigError: a character that the training text does not have.

        """
        if self.kind == "bpe":
            return np.array(self._bpe.encode(text).ids, np.uint32)
        if self.kind == "bytes":
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 1
        codes, known = _code_points(text), self._known
        places = np.searchsorted(known, codes).clip(max=len(known) - 1)
        unknown = known[places] != codes
        if unknown.any():
            character = chr(codes[unknown.argmax()])
            raise ConfigError(
                f"data.tokens = characters: {character!r} (U+{ord(character):04X}) is not among "
                f"the {len(known)} of the training text; take bytes or bpe, or other text"
            )
        return (places + 1).astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens without ends of texts; what is no UTF-8 is replaced by U+FFFD."""
        kept = [int(token) for token in ids if token != END_OF_TEXT]
        if self.kind == "bpe":
            return self._bpe.decode(kept)
        if self.kind == "bytes":
            return bytes(token - 1 for token in kept).decode(errors="replace")
        return "".join(self.content[token - 1] for token in kept)

    @cached_property
    def _known(self) -> Ids:
        return _code_points(self.content)

    @cached_property
    def _bpe(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.content)
        # the end of a text that is spelled out in a text is text
        tokenizer.encode_special_tokens = True
        return tokenizer

    def __getstate__(self) -> dict[str, str]:
        return {"kind": self.kind, "content": self.content}


def make_tokenizer(kind: Kind, texts: Sequence[str], vocabulary: int) -> TextTokenizer:
    """The tokenizer of these texts.

    Args:
        kind: what a token is.
        texts: all of the training text; a BPE may be trained on a part of it.
        vocabulary: of ``bpe``, how many tokens at most.

    """
    if kind == "bpe":
        return TextTokenizer(kind, train_bpe(texts, vocabulary, special=[END]))
    if kind == "characters":
        return TextTokenizer(kind, "".join(sorted(set().union(*texts))))
    return TextTokenizer(kind)


class Chunk(NamedTuple):
    """A part of a text: pieces of documents, all but the first the beginning of one.

    ``continues`` says that no end of a text comes before the first one either.
    """

    pieces: tuple[str, ...]
    continues: bool


def chunks(documents: Iterable[str], size: int) -> Iterator[Chunk]:
    """A text in chunks of about ``size`` characters that are tokenised alike by themselves."""
    pieces: list[str] = []
    continues, held = True, 0
    for number, document in enumerate(documents):
        for place, piece in enumerate(_cut(document, size)):
            if pieces and (place or held + len(piece) > size):
                yield Chunk(tuple(pieces), continues)
                pieces, held = [], 0
            if not pieces:
                continues = number == 0 or place > 0
            pieces.append(piece)
            held += len(piece)
    if pieces:
        yield Chunk(tuple(pieces), continues)


def encode_chunk(tokenizer: TextTokenizer, chunk: Chunk) -> Ids:
    """Task: the tokens of a chunk, an end of a text before each document but the first.

    Raises:
        ConfigError: what :meth:`TextTokenizer.encode` raises.

    """
    end = np.array([END_OF_TEXT], np.uint32)
    parts = [part for piece in chunk.pieces for part in (end, tokenizer.encode(piece))]
    return np.concatenate(parts[1:] if chunk.continues else parts)


def _cut(document: str, size: int) -> Iterator[str]:
    """A document cut after ends of lines, where the pre-tokeniser of the BPE always cuts.

    That is between two characters that are no white space: in a run of it the next line decides
    how this one is divided.
    """
    start = 0
    position = document.find("\n", size)
    while 0 <= position < len(document) - 1:
        if not document[position - 1].isspace() and not document[position + 1].isspace():
            yield document[start : position + 1]
            start = position + 1
            position += size
        position = document.find("\n", position + 1)
    yield document[start:]


def _code_points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
