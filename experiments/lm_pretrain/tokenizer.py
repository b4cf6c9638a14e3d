"""Tokenizer of running text: byte-level BPE, characters or bytes; token 0 ends a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.common.tokenizer import load_tokenizer, train_bpe
from raypipe import ConfigError

Kind = Literal["bpe", "characters", "bytes"]
Ids = NDArray[np.uint32]

#: the token between two documents, and its spelling in a BPE
END_OF_TEXT = 0
END = "<|endoftext|>"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer by its kind and content; cheap to pickle.

    Attributes:
        kind: the unit of text that is one token.
        content: for ``bpe``, JSON of the library ``tokenizers``; for ``characters``, the sorted
            characters; otherwise empty.

    """

    kind: Kind
    content: str = ""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens, including the end of a text."""
        if self.kind == "bpe":
            return load_tokenizer(self.content).get_vocab_size()
        return 1 + (len(self.content) if self.kind == "characters" else 256)

    def encode(self, text: str) -> Ids:
        """Return the tokens of a text, without an end of text.

        Raises:
            ConfigError: a character that the training text does not have.

        """
        if self.kind == "bpe":
            return np.array(load_tokenizer(self.content).encode(text).ids, np.uint32)
        if self.kind == "bytes":
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 1
        codes, known = _code_points(text), _code_points(self.content)
        places = np.searchsorted(known, codes).clip(max=len(known) - 1)
        unknown = known[places] != codes
        if unknown.any():
            character = chr(codes[unknown.argmax()])
            raise ConfigError(
                f"data.tokens = characters: {character!r} (U+{ord(character):04X}) is not among "
                f"the {len(known)} of the training text; use bytes or bpe, or another text"
            )
        return (places + 1).astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; ends of text are skipped, invalid UTF-8 becomes U+FFFD."""
        tokens = [int(token) for token in ids if token != END_OF_TEXT]
        if self.kind == "bpe":
            return load_tokenizer(self.content).decode(tokens)
        if self.kind == "bytes":
            return bytes(token - 1 for token in tokens).decode(errors="replace")
        return "".join(self.content[token - 1] for token in tokens)


def make_tokenizer(kind: Kind, texts: Sequence[str], vocabulary: int) -> TextTokenizer:
    """Return the tokenizer of these texts.

    Args:
        kind: the unit of text that is one token.
        texts: the whole training text; for ``bpe``, a part of it is enough.
        vocabulary: for ``bpe``, the maximum number of tokens.

    """
    if kind == "bpe":
        return TextTokenizer(kind, train_bpe(texts, vocabulary, special=[END]))
    if kind == "characters":
        return TextTokenizer(kind, "".join(sorted(set().union(*texts))))
    return TextTokenizer(kind)


class Chunk(NamedTuple):
    """Part of a text: pieces of documents, of which all but the first begin a document.

    ``continues``: whether the first piece follows without an end of text, too.
    """

    pieces: tuple[str, ...]
    continues: bool


def chunks(documents: Iterable[str], size: int) -> Iterator[Chunk]:
    """Yield a text in chunks of about ``size`` characters.

    The tokens of the chunks, in order, are the tokens of the whole text.
    """
    pieces: list[str] = []
    continues, length = True, 0
    for number, document in enumerate(documents):
        for place, piece in enumerate(_cut(document, size)):
            if pieces and (place or length + len(piece) > size):
                yield Chunk(tuple(pieces), continues)
                pieces, length = [], 0
            if not pieces:
                continues = number == 0 or place > 0
            pieces.append(piece)
            length += len(piece)
    if pieces:
        yield Chunk(tuple(pieces), continues)


def encode_chunk(tokenizer: TextTokenizer, chunk: Chunk) -> Ids:
    """Return the tokens of a chunk, with an end of text between documents.

    Raises:
        ConfigError: see :meth:`TextTokenizer.encode`.

    """
    end = np.array([END_OF_TEXT], np.uint32)
    parts = [part for piece in chunk.pieces for part in (end, tokenizer.encode(piece))]
    return np.concatenate(parts[1:] if chunk.continues else parts)


def _cut(document: str, size: int) -> Iterator[str]:
    """Cut a document after ends of lines where the pre-tokenizer of the BPE always cuts.

    That is between two characters that are not white space: in a run of white space, the next
    line decides how this one is divided.
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
