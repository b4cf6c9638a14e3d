"""Texts as tokens and back: by a BPE that is trained here, or a pretrained model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from raypipe.datasets.bpe import FEWEST_TOKENS as _FEWEST
from raypipe.datasets.bpe import train_bpe

#: of the BPE: padding, which also begins a summary, and the end of a text
SPECIAL = ("<pad>", "</s>")
#: the id of the latter, as in every T5
END = 1
#: the 256 bytes and the special tokens
FEWEST_TOKENS = _FEWEST - 1 + len(SPECIAL)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer; cheap to pickle. Either is given.

    Attributes:
        content: of a BPE, JSON of the library ``tokenizers``.
        pretrained: the name or directory of a pretrained model.

    """

    content: str | None = None
    pretrained: str | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, its end left out."""
        if self.pretrained is not None:
            from experiments.summarization.pretrained import encode

            return encode(self.pretrained, texts)
        return [each.ids for each in self._bpe.encode_batch_fast(list(texts))]

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each list of tokens, without surrounding white space."""
        if self.pretrained is not None:
            from experiments.summarization.pretrained import decode

            return decode(self.pretrained, ids)
        return [self._bpe.decode(list(each)).strip() for each in ids]

    @cached_property
    def _bpe(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.content or "")
        tokenizer.encode_special_tokens = True  # a text "</s>" is text
        return tokenizer

    def __getstate__(self) -> dict[str, str | None]:
        return {"content": self.content, "pretrained": self.pretrained}


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> TextTokenizer:
    """Task: a BPE of ``vocabulary`` tokens at most."""
    return TextTokenizer(train_bpe(texts, vocabulary, special=SPECIAL))


class Lengths(NamedTuple):
    """Tokens at most, ends included."""

    source: int
    target: int


class Encoded(NamedTuple):
    """Encoded documents, and how many documents and summaries were cut.

    ``pairs`` has a row a summary, ``source`` and ``target``; ``documents`` a row a document,
    ``source``, ``text`` and ``references``.
    """

    pairs: pa.Table
    documents: pa.Table
    cut_sources: int
    cut_targets: int


def encode_pairs(
    tokenizer: TextTokenizer,
    prefix: str,
    lengths: Lengths,
    documents: Sequence[str],
    summaries: Sequence[Sequence[str]],
) -> Encoded:
    """Task: tokens that end with :data:`END`; of what is too long the beginning."""
    sources = tokenizer.encode([prefix + text for text in documents])
    references = [len(each) for each in summaries]
    targets = tokenizer.encode([text for each in summaries for text in each])
    cut_sources = [_ended(ids, lengths.source) for ids in sources]
    ids = pa.list_(pa.int32())
    source = pa.array(cut_sources, ids)
    pairs = pa.table(
        {
            "source": source.take(pa.array(np.repeat(np.arange(len(documents)), references))),
            "target": pa.array([_ended(ids, lengths.target) for ids in targets], ids),
        }
    )
    kept = {
        "source": source,
        "text": pa.array(documents, pa.large_string()),
        "references": pa.array(summaries, pa.list_(pa.large_string())),
    }
    return Encoded(
        pairs,
        pa.table(kept),
        sum(len(ids) >= lengths.source for ids in sources),
        sum(len(ids) >= lengths.target for ids in targets),
    )


def _ended(ids: list[int], length: int) -> list[int]:
    return [*ids[: length - 1], END]
