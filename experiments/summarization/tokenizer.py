"""Tokenizer of documents and summaries: a BPE trained here, or a pretrained model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from experiments.common.bpe import FEWEST_TOKENS as _FEWEST
from experiments.common.bpe import load_tokenizer, train_bpe

#: special tokens of the BPE: padding, which also begins a summary, and the end of a text
SPECIAL = ("<pad>", "</s>")
#: the id of the end; every T5 has the same two ids
END = 1
#: the 256 bytes and the special tokens
FEWEST_TOKENS = _FEWEST - 1 + len(SPECIAL)


@dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer as JSON of the library ``tokenizers``; cheap to pickle."""

    content: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens and without its end."""
        tokenizer = load_tokenizer(self.content)
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[token for token in each.ids if token > END] for each in encoded]

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """Return the text of each list of tokens, without surrounding white space."""
        texts = load_tokenizer(self.content).decode_batch([list(each) for each in ids])
        return [text.strip() for text in texts]


def make_tokenizer(texts: Sequence[str], vocabulary: int, pretrained: str | None) -> str:
    """Return the JSON of a BPE with at most ``vocabulary`` tokens, or of a pretrained tokenizer."""
    if pretrained is None:
        return train_bpe(texts, vocabulary, special=SPECIAL)
    from experiments.summarization.pretrained import tokenizer_content

    tokenizer = Tokenizer.from_str(tokenizer_content(pretrained))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    content: str = tokenizer.to_str()
    return content


class Lengths(NamedTuple):
    """Maximum numbers of tokens, including the end."""

    source: int
    target: int


class Encoded(NamedTuple):
    """Encoded documents, and the numbers of documents and summaries that were cut.

    ``pairs`` has a row per summary (``source``, ``target``); ``documents`` has a row per document
    (``source``, ``text``, ``references``).
    """

    pairs: pa.Table
    documents: pa.Table
    cut_sources: int
    cut_targets: int


def encode_pairs(
    tokenizer: SubwordTokenizer,
    prefix: str,
    lengths: Lengths,
    documents: Sequence[str],
    summaries: Sequence[Sequence[str]],
) -> Encoded:
    """Return the tokens of pairs; each text ends with :data:`END`, and long ones are cut."""
    sources = tokenizer.encode([prefix + text for text in documents])
    references = [len(each) for each in summaries]
    targets = tokenizer.encode([text for each in summaries for text in each])
    ids = pa.list_(pa.int32())
    source = pa.array([_ended(tokens, lengths.source) for tokens in sources], ids)
    pairs = {
        "source": source.take(pa.array(np.repeat(np.arange(len(documents)), references))),
        "target": pa.array([_ended(tokens, lengths.target) for tokens in targets], ids),
    }
    texts = {
        "source": source,
        "text": pa.array(documents, pa.large_string()),
        "references": pa.array(summaries, pa.list_(pa.large_string())),
    }
    return Encoded(
        pa.table(pairs),
        pa.table(texts),
        sum(len(tokens) >= lengths.source for tokens in sources),
        sum(len(tokens) >= lengths.target for tokens in targets),
    )


def _ended(ids: list[int], length: int) -> list[int]:
    return [*ids[: length - 1], END]
