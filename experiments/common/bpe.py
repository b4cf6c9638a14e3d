"""Byte-level BPE tokenizer, trained on given texts."""

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
    """Return a tokenizer of these texts as JSON of the library ``tokenizers``.

    Special tokens come first. The others are merged bytes (Radford et al. 2019, Language models are
    unsupervised multitask learners, section 2.2), so it can encode any text.

    Args:
        texts: the training texts.
        vocabulary: maximum number of token ids, at least 256 and the special ones; few texts give
            fewer.
        length: maximum tokens per text, which is truncated; None for whole texts.
        special: the tokens 0, 1, ... that do not represent text; by default the padding.

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
    """Return the token ids of texts as int32 lists, truncated at the tokenizer's length."""
    encoded = load_tokenizer(tokenizer).encode_batch_fast(list(texts))
    return pa.array([each.ids for each in encoded], pa.list_(pa.int32()))


@lru_cache(maxsize=1)
def load_tokenizer(content: str) -> Tokenizer:
    """Return the tokenizer of a JSON text; a literal ``[PAD]`` is text to it. Do not modify it.

    The last one is cached, because a process runs many tasks with the same tokenizer.
    """
    tokenizer = Tokenizer.from_str(content)
    tokenizer.encode_special_tokens = True
    return tokenizer
