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
#: the id of the latter; both are those of every T5
END = 1
#: the 256 bytes and the special tokens
FEWEST_TOKENS = _FEWEST - 1 + len(SPECIAL)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer as JSON of the library ``tokenizers``; cheap to pickle."""

    content: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, none of which is special: its end is left out."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[token for token in each.ids if token > END] for each in encoded]

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each list of tokens, without surrounding white space."""
        return [text.strip() for text in self._tokenizer.decode_batch([list(i) for i in ids])]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.content)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # a text "</s>" is text
        return tokenizer

    def __getstate__(self) -> dict[str, str]:
        return {"content": self.content}


def make_tokenizer(texts: Sequence[str], vocabulary: int, pretrained: str | None) -> TextTokenizer:
    """Task: a BPE of ``vocabulary`` tokens at most, or the tokenizer of a pretrained model."""
    if pretrained is None:
        return TextTokenizer(train_bpe(texts, vocabulary, special=SPECIAL))
    from experiments.summarization.pretrained import tokenizer_content

    return TextTokenizer(tokenizer_content(pretrained))


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
