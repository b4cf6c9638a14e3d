"""Phase 1, encode: vectors of documents and classes, in blocks, on all workers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.teleclass.data.corpus import LabeledCorpus
from experiments.teleclass.embeddings import Embeddings, Vectors, embeddings_of, text_sets
from experiments.teleclass.encoders import fit_lsa, is_fitted, lsa_identity, stored_encoder
from experiments.teleclass.settings import EncodeSettings
from experiments.teleclass.task_pools import pool_options
from raypipe.graph.context import StageContext
from raypipe.store.cache import Cache


@dataclass(frozen=True)
class _TextBlock:
    """A block of texts by their cache keys, with the vectors that are known; equal texts share one.

    ``keys`` are in the order of the rows.
    """

    embeddings: Embeddings
    number: int
    texts: Mapping[str, str]
    keys: Sequence[str]
    known: dict[str, Vectors] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"encode/{self.embeddings.name}/{self.number}"

    @property
    def identity(self) -> str:
        """The fingerprint of the encoder and all texts of the block."""
        return hashlib.sha256(" ".join(self.keys).encode()).hexdigest()

    @property
    def missing(self) -> list[str]:
        """The keys of the texts without a known vector."""
        return [key for key in self.texts if key not in self.known]

    def write(self) -> None:
        """Store the block once all vectors are known."""
        vectors = np.stack([self.known[key] for key in self.keys])
        self.embeddings.write(self.number, vectors, self.identity)


def run_encode(corpus: LabeledCorpus, context: StageContext) -> None:
    """Encode the documents, the classes and their names; keep blocks that are stored.

    Raises:
        UnitError: a task failed for good; the blocks of the others are stored.

    """
    _report_dropped(corpus, context)
    settings: EncodeSettings = context.settings.encode
    if settings.model is None:
        _fit_lsa(corpus, context, settings)
    encoder = stored_encoder(context.run_dir, corpus, settings)
    sets = [embeddings_of(context.run_dir, corpus, settings, name) for name in text_sets(corpus)]
    done = cached = 0
    context.begin(sum(embeddings.rows for embeddings in sets))
    options = pool_options(context, settings, neural=settings.model is not None)
    with Cache("embeddings", enabled=settings.cache) as cache, context.pool(options) as pool:

        def calls() -> Iterator[tuple[_TextBlock, Any, list[str]]]:
            nonlocal done, cached
            for embeddings in sets:
                for number in range(len(embeddings)):
                    texts = _texts(corpus, embeddings.name, *embeddings.bounds(number))
                    block = _block(embeddings, number, texts, encoder.fingerprint)
                    if not embeddings.holds(number, block.identity):
                        for key, row in cache.get(block.texts).items():
                            vector = base64.b85decode(row["vector"])
                            block.known[key] = np.frombuffer(vector, np.float32)
                        cached += len(block.known)
                        if block.missing:
                            yield block, encoder.encode, [block.texts[k] for k in block.missing]
                            continue
                        block.write()
                    done += len(block.keys)

        for block, vectors in context.map(pool, calls()):
            computed = dict(zip(block.missing, vectors, strict=True))
            block.known.update(computed)
            block.write()
            rows = {key: base64.b85encode(v.tobytes()).decode() for key, v in computed.items()}
            cache.put({key: {"vector": text} for key, text in rows.items()})
            done += len(block.keys)
            context.advance(done, f"{cached} known from other runs" if cached else "")


def _report_dropped(corpus: LabeledCorpus, context: StageContext) -> None:
    parts = {"train": corpus.train, "test": corpus.test, "taxonomy": corpus.taxonomy}
    for name, part in parts.items():
        for reason, number in part.dropped.items() if part is not None else ():
            context.say(f"{name}: {reason}: {number}")


def _fit_lsa(corpus: LabeledCorpus, context: StageContext, settings: EncodeSettings) -> None:
    """Fit LSA to an even sample of the documents and to the classes, unless its weights exist."""
    identity = lsa_identity(corpus, settings)
    if is_fitted(context.run_dir, identity):
        return
    count = min(settings.fit_documents, len(corpus.train))
    rows = np.unique(np.linspace(0, len(corpus.train) - 1, count).astype(np.int64))
    texts = corpus.train.take(rows).text_list(0, len(rows)) + corpus.taxonomy.descriptions()
    arguments = (texts, settings, identity, context.run_dir)
    dimensions = context.call("encode/fit", fit_lsa, *arguments)
    context.say(f"lsa of {len(texts)} texts: {dimensions} dimensions")


def _texts(corpus: LabeledCorpus, name: str, start: int, stop: int) -> list[str]:
    if name == "classes":
        return corpus.taxonomy.descriptions()[start:stop]
    if name == "names":
        return [text.replace("_", " ") for text in corpus.taxonomy.names[start:stop]]
    return corpus.documents(name).text_list(start, stop)


def _block(embeddings: Embeddings, number: int, texts: Sequence[str], encoder: str) -> _TextBlock:
    keys = [hashlib.sha256(f"{encoder} {text}".encode()).hexdigest() for text in texts]
    return _TextBlock(embeddings, number, dict(zip(keys, texts, strict=True)), keys)
