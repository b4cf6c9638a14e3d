"""Tokenizers as JSON of the library ``tokenizers``: byte-level BPE, tokens of texts, storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from raypipe import ConfigError, RunDirectory, StageContext

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


def tokenizer_path(run_dir: RunDirectory, stage: str = "tokenize") -> str:
    """Return the path of the tokenizer that a stage stores."""
    return run_dir.artifact(stage, "tokenizer.json")


def store_tokenizer(context: StageContext, make: Callable[..., str], *arguments: object) -> str:
    """Make a tokenizer in a task, store it, and return it as JSON."""
    content: str = context.call(f"{context.stage.name}/tokenizer", make, *arguments)
    path = tokenizer_path(context.run_dir, context.stage.name)
    context.run_dir.write(path, content.encode())
    return content


def read_tokenizer(run_dir: RunDirectory) -> str:
    """Return the stored tokenizer as JSON. Raises ConfigError if it is missing."""
    path = tokenizer_path(run_dir)
    try:
        return run_dir.read(path).decode()
    except OSError as error:
        raise ConfigError(
            f"{path}: the result of the tokenize stage is missing ({error}); run the configuration "
            "in another run directory"
        ) from error
