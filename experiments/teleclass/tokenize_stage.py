"""Tokenize stage: the training set as tokens, with vectors if the classifier reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from experiments.teleclass.artifacts import (
    generated_documents,
    tokenizer_path,
    training_set_path,
    vector_lists,
)
from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.embeddings import Embeddings, Vectors, embeddings_of
from experiments.teleclass.phases.encode import encode_texts
from experiments.teleclass.settings import takes_vectors
from raypipe.datasets.bpe import token_lists, train_bpe
from raypipe.errors import ConfigError
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.launcher import PoolOptions
from raypipe.storage.artifacts import read_arrow, read_parquet, write_arrow
from raypipe.storage.run_directory import RunDirectory

#: documents per block
BLOCK = 4096
#: documents that the tokenizer is trained on, spread evenly over the training set
TRAINED_ON = 50_000


def read_tokens(run_dir: RunDirectory, number: int) -> pa.Table:
    """Return a block of the training set, memory-mapped: ``tokens``, ``labels``, maybe ``vector``.

    Raises:
        OSError, ValueError: it is missing or damaged.

    """
    return read_arrow(run_dir, _block_path(run_dir, number))


def tokenize(corpus: Corpus, context: StageContext) -> None:
    """Build the tokenizer, and store the training set in blocks as the classifier reads it."""
    run_dir, encoding = context.run_dir, context.settings.encode
    classifier = context.settings.train.classifier
    table = read_parquet(run_dir, training_set_path(run_dir))
    sample = _texts(context, corpus, evenly_spread(table, TRAINED_ON))
    arguments = (classifier.pretrained, classifier.vocabulary, classifier.length)
    tokenizer = context.call("tokenize/tokenizer", make_tokenizer, sample, *arguments)
    run_dir.write(tokenizer_path(run_dir), tokenizer.encode())
    stored = embeddings_of(run_dir, corpus, encoding, "train")
    texts, _ = generated_documents(context)
    new = np.empty((0, 0), np.float32)  # the vectors of the generated documents
    if takes_vectors(classifier) and len(texts):
        new = encode_texts(context, corpus, encoding, texts.to_pylist())
    context.begin(len(table))
    done = 0

    def calls() -> Iterator[tuple[int, Any, str, list[str]]]:
        for start in range(0, len(table), BLOCK):
            yield start, token_lists, tokenizer, _texts(context, corpus, table.slice(start, BLOCK))

    with context.pool(PoolOptions()) as pool:
        for start, tokens in context.map(pool, calls()):
            part = table.slice(start, BLOCK)
            columns = {"tokens": tokens, "labels": part.column("labels")}
            if takes_vectors(classifier):
                columns["vector"] = vector_lists(_vectors(stored, new, part))
            path = _block_path(run_dir, start // BLOCK)
            write_arrow(run_dir, path, pa.table(columns).combine_chunks())
            done += len(part)
            context.advance(done)


def evenly_spread(table: pa.Table, most: int) -> pa.Table:
    """Return at most ``most`` rows of a table, spread evenly: files are often sorted by class."""
    return table.take(pa.array(range(0, len(table), max(1, -(-len(table) // most)))))


def _texts(context: StageContext, corpus: Corpus, part: pa.Table) -> list[str]:
    """Return the texts of some rows of the training set, generated documents last."""
    documents, written = _split(part)
    texts, _ = generated_documents(context)
    own = corpus.train.take(documents)
    return [*own.text_list(0, len(own)), *texts.take(pa.array(written)).to_pylist()]


def _vectors(stored: Embeddings, new: Vectors, part: pa.Table) -> Vectors:
    """Return their vectors ``[n, d]``: those of phase 1, then the generated documents'."""
    documents, written = _split(part)
    parts = [stored.read_rows(documents)] if len(documents) else []
    return np.concatenate([*parts, new[written]] if len(written) else parts)


def _split(part: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows = part.column("row").to_numpy()
    own = pc.equal(part.column("origin"), "document").to_numpy()
    return rows[own], rows[~own]


def make_tokenizer(
    texts: Sequence[str], pretrained: str | None, vocabulary: int, length: int
) -> str:
    """Return the tokenizer as JSON: the pretrained model's, or a byte-level BPE of these texts.

    Raises:
        ConfigError: as :func:`pretrained_tokenizer`.

    """
    if pretrained is not None:
        return pretrained_tokenizer(pretrained, length)
    return train_bpe(texts, vocabulary, length)


@lru_cache(maxsize=4)  # a sweep builds the stages of every trial
def pretrained_tokenizer(model: str, length: int) -> str:
    """Return the tokenizer of a pretrained model as JSON; it cuts texts at ``length``.

    Raises:
        ConfigError: the model has no fast tokenizer, or reads only shorter texts.

    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"train.classifier.pretrained = {model}: its tokenizer cannot be loaded: {error}"
        ) from error
    # for a folder without a tokenizer the library returns an empty one
    if not loaded.is_fast or len(loaded) <= len(loaded.all_special_tokens):
        raise ConfigError(
            f"train.classifier.pretrained = {model}: has no fast tokenizer; "
            "take a model with a tokenizer.json"
        )
    if length > loaded.model_max_length:
        raise ConfigError(
            f"train.classifier.length = {length}: {model} reads at most "
            f"{loaded.model_max_length} tokens; lower it"
        )
    tokenizer = loaded.backend_tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    text: str = tokenizer.to_str()
    return text


def _block_path(run_dir: RunDirectory, number: int) -> str:
    return run_dir.artifact("tokenize", f"{number:06d}.arrow")
