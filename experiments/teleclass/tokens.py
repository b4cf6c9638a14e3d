"""Between phases 4 and 5: the training set as tokens, and as vectors where those are an input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from experiments.teleclass.artifacts import vector_lists
from experiments.teleclass.augmentation import generated_documents
from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.embeddings import Embeddings, Vectors
from experiments.teleclass.encoding import embeddings_of, encode_texts
from experiments.teleclass.hierarchy import training_set_path
from experiments.teleclass.settings import ClassifierSettings, EncodeSettings
from raypipe.datasets.bpe import token_lists, train_bpe
from raypipe.errors import ConfigError
from raypipe.pipeline.context import Call, StageContext
from raypipe.pipeline.launcher import PoolOptions
from raypipe.storage.artifacts import read_arrow, read_parquet, write_arrow
from raypipe.storage.run_directory import RunDirectory

#: documents a block
BLOCK = 4096
_TRAINED_ON = 50_000


def tokenizer_path(run: RunDirectory) -> str:
    """The tokenizer, as the library ``tokenizers`` writes it."""
    return run.artifact("tokenise", "tokenizer.json")


def read_tokens(run: RunDirectory, number: int) -> pa.Table:
    """A block of the training set: ``tokens``, ``labels`` and perhaps ``vector``; mapped, not read.

    Raises:
        OSError, ValueError: it is missing or damaged.

    """
    return read_arrow(run, _block_path(run, number))


def tokenise(
    context: StageContext, corpus: Corpus, encoding: EncodeSettings, settings: ClassifierSettings
) -> None:
    """Make the tokenizer, and store the training set as the classifier takes it, block by block."""
    run = context.run_dir
    table = read_parquet(run, training_set_path(run))
    starts = range(0, len(table), BLOCK)
    parts = (table.slice(start, BLOCK) for start in islice(starts, -(-_TRAINED_ON // BLOCK)))
    sample = [text for part in parts for text in _texts(context, corpus, part)]
    made = context.call("tokenise/tokenizer", make_tokenizer, sample, settings)
    run.write(tokenizer_path(run), made.encode())
    stored = embeddings_of(run, corpus, encoding, "train")
    texts, _ = generated_documents(context)
    new = np.empty((0, 0), np.float32)  # the vectors of the written documents
    if settings.takes_vectors and len(texts):
        new = encode_texts(context, corpus, encoding, texts.to_pylist())
    context.begin(len(table))
    done = 0

    def calls() -> Iterator[Call]:
        for start in starts:
            texts = _texts(context, corpus, table.slice(start, BLOCK))
            yield f"tokenise/{start}", token_lists, made, texts

    with context.pool(PoolOptions()) as pool:
        for name, tokens in context.map(pool, calls()):
            start = int(name.rpartition("/")[2])
            part = table.slice(start, BLOCK)
            columns = {"tokens": tokens, "labels": part.column("labels")}
            if settings.takes_vectors:
                columns["vector"] = vector_lists(_vectors(stored, new, part))
            write_arrow(run, _block_path(run, start // BLOCK), pa.table(columns).combine_chunks())
            done += len(part)
            context.advance(done)


def _texts(context: StageContext, corpus: Corpus, part: pa.Table) -> list[str]:
    """The texts of some rows of the training set, whose written documents come last."""
    documents, written = _split(part)
    texts, _ = generated_documents(context)
    own = corpus.train.take(documents)
    return [*own.text_list(0, len(own)), *texts.take(pa.array(written)).to_pylist()]


def _vectors(stored: Embeddings, new: Vectors, part: pa.Table) -> Vectors:
    """Their vectors ``[n, d]``: those of phase 1, and the new ones of the written documents."""
    documents, written = _split(part)
    parts = [stored.read_rows(documents)] if len(documents) else []
    return np.concatenate([*parts, new[written]] if len(written) else parts)


def _split(part: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows = part.column("row").to_numpy()
    own = pc.equal(part.column("origin"), "document").to_numpy()
    return rows[own], rows[~own]


def make_tokenizer(texts: Sequence[str], settings: ClassifierSettings) -> str:
    """The tokenizer as JSON: that of the pretrained model, or a byte-level BPE of these texts.

    Raises:
        ConfigError: what :func:`pretrained_tokenizer` refuses.

    """
    if settings.pretrained is not None:
        return pretrained_tokenizer(settings.pretrained, settings.length)
    return train_bpe(texts, settings.vocabulary, settings.length)


@lru_cache(maxsize=4)  # a sweep asks for the stages of each of its trials
def pretrained_tokenizer(model: str, length: int) -> str:
    """The tokenizer of a pretrained model, by name or directory, as JSON; it cuts at ``length``.

    Raises:
        ConfigError: there is none of the library ``tokenizers``, or the model reads only shorter
            texts.

    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"train.classifier.pretrained = {model}: its tokenizer cannot be loaded: {error}"
        ) from error
    # of a folder without a tokenizer the library makes one that knows no word
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


def _block_path(run: RunDirectory, number: int) -> str:
    return run.artifact("tokenise", f"{number:06d}.arrow")
