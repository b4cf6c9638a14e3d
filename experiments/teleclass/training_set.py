"""Phase 4 and what phase 5 reads: label sets with all ancestors, texts as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset

from experiments.teleclass.artifacts import (
    label_lists,
    label_matrix,
    read_arrow,
    read_parquet,
    write_arrow,
    write_parquet,
)
from experiments.teleclass.augmentation import generated_documents
from experiments.teleclass.corpus import Corpus
from experiments.teleclass.refine import pseudo_labels_path
from experiments.teleclass.settings import ClassifierSettings
from raypipe.errors import ConfigError
from raypipe.launch.launcher import PoolOptions
from raypipe.paths import RunDirectory
from raypipe.runner import Call, StageContext

#: the padding of the tokenizers trained here, which the transformer masks
PADDING = 0
_BLOCK = 4096
_TRAINED_ON = 50_000
Sample = tuple[NDArray[np.int32], NDArray[np.int32]]


def training_set_path(run: RunDirectory) -> str:
    """Which documents are trained on, and their labels with all ancestors."""
    return run.artifact("hierarchy", "training_set.parquet")


def tokenizer_path(run: RunDirectory) -> str:
    """The tokenizer, as the library ``tokenizers`` writes it."""
    return run.artifact("tokenise", "tokenizer.json")


def add_ancestors(context: StageContext, corpus: Corpus) -> None:
    """Complete the label sets upward, of the documents that have labels and of the written ones.

    Raises:
        ValueError: no document has a label.

    """
    taxonomy, run = corpus.taxonomy, context.run
    stored = read_parquet(run, pseudo_labels_path(run))
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
    write_parquet(run, training_set_path(run), table)
    added = labels.sum() - found.sum() - len(classes)
    context.say(f"{len(table)} documents, {labels.sum()} labels, {added} of them ancestors")


def tokenise(context: StageContext, corpus: Corpus, settings: ClassifierSettings) -> None:
    """Make the tokenizer, and store the training set as tokens, in blocks for memory mapping."""
    run = context.run
    table = read_parquet(run, training_set_path(run))
    rows = table.column("row").to_numpy()
    is_document = pc.equal(table.column("origin"), "document").to_numpy()
    generated, _ = generated_documents(context)

    def texts(start: int, stop: int) -> list[str]:
        own = is_document[start:stop]
        documents = corpus.train.take(rows[start:stop][own])
        written = generated.take(pa.array(rows[start:stop][~own])).to_pylist()
        return [*documents.text_list(0, len(documents)), *written]

    starts = range(0, len(table), _BLOCK)
    sample = [
        text
        for start in starts[: -(-_TRAINED_ON // _BLOCK)]
        for text in texts(start, start + _BLOCK)
    ]
    made = context.call("tokenise/tokenizer", make_tokenizer, sample, settings)
    run.write(tokenizer_path(run), made.encode())
    context.begin(len(table))
    done = 0

    def calls() -> Iterator[Call]:
        for start in starts:
            yield f"tokenise/{start}", token_lists, made, texts(start, start + _BLOCK)

    with context.pool(PoolOptions()) as pool:
        for name, tokens in context.map(pool, calls()):
            start = int(name.rpartition("/")[2])
            part = pa.table(
                {"tokens": tokens, "labels": table.column("labels")[start : start + _BLOCK]}
            ).combine_chunks()
            write_arrow(run, _block_path(run, start // _BLOCK), part)
            done += len(part)
            context.advance(done)


def make_tokenizer(texts: Sequence[str], settings: ClassifierSettings) -> str:
    """The tokenizer as JSON: that of the pretrained model, or a byte-level BPE of these texts.

    Raises:
        ConfigError: the pretrained model has none of the library ``tokenizers``, or reads only
            shorter texts.

    """
    if settings.pretrained is None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=settings.vocabulary,
            special_tokens=["[PAD]"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    else:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(settings.pretrained)
        if not loaded.is_fast:
            raise ConfigError(
                f"train.classifier.pretrained = {settings.pretrained}: has no fast tokenizer; "
                "take a model with a tokenizer.json"
            )
        if settings.length > loaded.model_max_length:
            raise ConfigError(
                f"train.classifier.length = {settings.length}: {settings.pretrained} reads at most "
                f"{loaded.model_max_length} tokens"
            )
        tokenizer = loaded.backend_tokenizer
        tokenizer.no_padding()
    tokenizer.enable_truncation(settings.length)
    text: str = tokenizer.to_str()
    return text


def token_lists(tokenizer: str, texts: Sequence[str]) -> pa.Array:
    """The token ids of texts, a list of int32 each, cut at the tokenizer's length."""
    encoded = _tokenizer(tokenizer).encode_batch_fast(list(texts))
    return pa.array([each.ids for each in encoded], pa.list_(pa.int32()))


@lru_cache(maxsize=1)
def _tokenizer(content: str) -> Tokenizer:
    return Tokenizer.from_str(content)


def _block_path(run: RunDirectory, number: int) -> str:
    return run.artifact("tokenise", f"{number:06d}.arrow")


@dataclass(frozen=True)
class TokenisedDocuments(Dataset[Sample]):
    """The training set as tokens and class indices, some rows of it; mapped, not read.

    Attributes:
        run: the run directory that holds it.
        rows: the positions that count, int64.

    """

    run: RunDirectory
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        block, row = divmod(int(self.rows[index]), _BLOCK)
        tokens, labels = self._block(block)
        return tokens[row].values.to_numpy(), labels[row].values.to_numpy()

    def _block(self, number: int) -> tuple[pa.ListArray, pa.ListArray]:
        if number not in self._blocks:
            table = read_arrow(self.run, _block_path(self.run, number))
            # one chunk each; combine_chunks would copy it
            columns = (table.column(name).chunk(0) for name in ("tokens", "labels"))
            self._blocks[number] = tuple(columns)
        return self._blocks[number]

    @cached_property
    def _blocks(self) -> dict[int, tuple[pa.ListArray, pa.ListArray]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {"run": self.run, "rows": self.rows}
