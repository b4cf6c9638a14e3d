"""Texts as token ids by a byte-level BPE that is trained on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: the 256 bytes and one special token
FEWEST_TOKENS = 257


def train_bpe(
    texts: Iterable[str],
    vocabulary: int,
    length: int | None = None,
    special: Sequence[str] = ("[PAD]",),
) -> str:
    """A tokenizer of these texts as JSON of the library ``tokenizers``; special tokens come first.

    Merges of bytes (Radford et al. 2019, Language models are unsupervised multitask learners,
    section 2.2): no text is without tokens of its own.

    Args:
        texts: what it is trained on.
        vocabulary: token ids at most, from 256 and the special ones; few texts give fewer.
        length: tokens of a text, the rest is cut; None for whole texts.
        special: the tokens that are no text, 0, 1, ...; by default the padding.

    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if length is not None:
        tokenizer.enable_truncation(length)
    text: str = tokenizer.to_str()
    return text


def token_lists(tokenizer: str, texts: Sequence[str]) -> pa.Array:
    """The token ids of texts, a list of int32 each, cut at the tokenizer's length."""
    encoded = load_tokenizer(tokenizer).encode_batch_fast(list(texts))
    return pa.array([each.ids for each in encoded], pa.list_(pa.int32()))


@lru_cache(maxsize=1)
def load_tokenizer(content: str) -> Tokenizer:
    """Return the tokenizer of a JSON text; it reads ``[PAD]`` in a text as text. Do not change it.

    The last one is cached, because a process works on many tasks with the same tokenizer.
    """
    tokenizer = Tokenizer.from_str(content)
    tokenizer.encode_special_tokens = True
    return tokenizer
