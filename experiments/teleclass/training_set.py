"""Phase 4, hierarchy, and the tokenize stage: the training set with ancestors, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse
from tokenizers import Tokenizer

from experiments.common.blocks import Block, evenly_spread, map_blocks
from experiments.common.pretrained import load_fast_tokenizer
from experiments.common.tokenizer import store_tokenizer, token_lists, train_bpe
from experiments.teleclass.artifacts import (
    generated_documents,
    label_lists,
    label_matrix,
    pseudo_labels_path,
    training_set_path,
    vector_lists,
)
from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.encoders import Vectors, embeddings_of, stored_encoder
from experiments.teleclass.settings import takes_vectors
from raypipe import ConfigError, RunDirectory, StageContext, artifacts


def run_hierarchy(corpus: LabeledCorpus, context: StageContext) -> None:
    """Write the training set: labeled and generated documents with all ancestors of their labels.

    Raises:
        ValueError: no document has a label.

    """
    taxonomy, run_dir = corpus.taxonomy, context.run_dir
    stored = artifacts.read_parquet(run_dir, pseudo_labels_path(run_dir))
    found = label_matrix(stored.column("labels"), len(taxonomy))
    rows = np.flatnonzero(np.diff(found.indptr))
    _, classes = generated_documents(context)
    ones = (np.ones(len(classes), bool), (np.arange(len(classes)), classes))
    written = sparse.csr_matrix(ones, (len(classes), len(taxonomy)))
    labels = taxonomy.closure(sparse.vstack((found[rows], written), "csr"))
    if not labels.shape[0]:
        raise ValueError("no document has a label, so there is nothing to train on")
    table = pa.table(
        {
            "origin": ["document"] * len(rows) + ["generated"] * len(classes),
            "row": np.concatenate((rows, np.arange(len(classes)))),
            "labels": label_lists(labels),
        }
    )
    artifacts.write_parquet(run_dir, training_set_path(run_dir), table)
    added = labels.sum() - found.sum() - len(classes)
    context.say(f"{len(table)} documents, {labels.sum()} labels, {added} of them ancestors")


#: documents per block
BLOCK = 4096
#: documents that the tokenizer is trained on at most
TRAINED_ON = 50_000


def read_tokens(run_dir: RunDirectory, number: int) -> pa.Table:
    """Return a block of the training set, memory-mapped: ``tokens``, ``labels``, maybe ``vector``.

    Raises:
        OSError, ValueError: it is missing or corrupt.

    """
    return artifacts.read_arrow(run_dir, _block_path(run_dir, number))


def run_tokenize(corpus: LabeledCorpus, context: StageContext) -> None:
    """Make the tokenizer, and store the training set in blocks as the classifier reads it."""
    run_dir, encoding = context.run_dir, context.settings.encode
    classifier = context.settings.train.classifier
    table = artifacts.read_parquet(run_dir, training_set_path(run_dir))
    generated, _ = generated_documents(context)

    def texts(part: pa.Table) -> list[str]:
        own, new = _rows(part)
        return [*corpus.train.texts.take(own).to_pylist(), *generated.take(new).to_pylist()]

    sample = texts(table.take(pa.array(evenly_spread(range(len(table)), TRAINED_ON))))
    arguments = (classifier.pretrained, classifier.vocabulary, classifier.length)
    tokenizer = store_tokenizer(context, make_tokenizer, sample, *arguments)
    stored = embeddings_of(run_dir, corpus, encoding, "train")
    encoded: Vectors = np.empty((0, 0), np.float32)
    if takes_vectors(classifier) and len(generated):
        encoder = stored_encoder(run_dir, encoding)
        on_gpu = encoding.model is not None and encoding.gpus != 0
        arguments = ("tokenize/vectors", encoder.encode, generated.to_pylist())
        encoded = context.call(*arguments, on_gpu=on_gpu)

    def part_of(block: Block[Any]) -> pa.Table:
        return table.slice(block.start, block.end - block.start)

    def call(block: Block[Any]) -> tuple[Any, ...]:
        return token_lists, tokenizer, texts(part_of(block))

    for block, tokens in map_blocks(context, {"train": len(table)}, BLOCK, call):
        columns = {"tokens": tokens, "labels": part_of(block).column("labels")}
        if takes_vectors(classifier):
            own, new = _rows(part_of(block))
            parts = [stored.read_rows(own)] if len(own) else []
            parts += [encoded[new]] if len(new) else []
            columns["vector"] = vector_lists(np.concatenate(parts))
        path = _block_path(run_dir, block.start // BLOCK)
        artifacts.write_arrow(run_dir, path, pa.table(columns).combine_chunks())


def _rows(part: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of corpus documents and of generated documents, which come last."""
    rows = part.column("row").to_numpy()
    own = pc.equal(part.column("origin"), "document").to_numpy()
    return rows[own], rows[~own]


def make_tokenizer(
    texts: Sequence[str], pretrained: str | None, vocabulary: int, length: int
) -> str:
    """Return the tokenizer as JSON: the pretrained model's, or a byte-level BPE of these texts.

    Raises:
        ConfigError: the model has no fast tokenizer, or reads only shorter texts.

    """
    if pretrained is None:
        return train_bpe(texts, vocabulary, length)
    loaded = load_fast_tokenizer(pretrained, f"train.classifier.pretrained = {pretrained}")
    if length > loaded.model_max_length:
        raise ConfigError(
            f"train.classifier.length = {length}: {pretrained} reads at most "
            f"{loaded.model_max_length} tokens; lower it"
        )
    tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    text: str = tokenizer.to_str()
    return text


def _block_path(run_dir: RunDirectory, number: int) -> str:
    return run_dir.artifact("tokenize", f"{number:06d}.arrow")
