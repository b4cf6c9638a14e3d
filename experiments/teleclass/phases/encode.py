"""Phase 1, encode: vectors of documents and classes, in blocks, on all workers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.embeddings import Embeddings, Vectors, embeddings_of, text_sets
from experiments.teleclass.encoders import (
    Encoder,
    LsaEncoder,
    fit_lsa,
    fitted_lsa,
    sentence_encoder,
)
from experiments.teleclass.settings import EncodeSettings
from experiments.teleclass.task_pools import pool_options
from raypipe.errors import ConfigError
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.identity import fingerprint
from raypipe.storage.cache import Cache
from raypipe.storage.ledger import Row


@dataclass(frozen=True)
class _Block:
    """A block of texts with the vectors that are known; equal texts share one."""

    embeddings: Embeddings
    number: int
    identity: str
    texts: Mapping[str, str]
    keys: Sequence[str]
    known: Mapping[str, Vectors]

    @property
    def missing(self) -> list[str]:
        """The keys of the texts without a known vector."""
        return [key for key in self.texts if key not in self.known]

    def __str__(self) -> str:
        return f"encode/{self.embeddings.name}/{self.number}"

    def write(self, computed: Mapping[str, Vectors]) -> None:
        """Store the block with these vectors in addition to the known ones."""
        vectors = {**self.known, **computed}
        self.embeddings.write(
            self.number, np.stack([vectors[key] for key in self.keys]), self.identity
        )


def encode(corpus: Corpus, context: StageContext) -> None:
    """Encode the documents, the classes and their names; keep blocks that are stored.

    Raises:
        UnitError: a task failed for good; the blocks of the others are stored.

    """
    for name in ("train", "test") if corpus.test else ("train",):
        for reason, number in corpus.documents(name).dropped.items():
            context.say(f"{name}: {reason}: {number}")
    for reason, number in corpus.taxonomy.dropped.items():
        context.say(f"taxonomy: {reason}: {number}")
    settings: EncodeSettings = context.settings.encode
    encoder = _encoder(context, corpus, settings)
    every = [embeddings_of(context.run_dir, corpus, settings, name) for name in text_sets(corpus)]
    total = sum(embeddings.rows for embeddings in every)
    done = taken_over = 0
    context.begin(total)

    with (
        Cache("embeddings", enabled=settings.cache) as cache,
        context.pool(pool_options(context, settings, neural=settings.model is not None)) as pool,
    ):

        def calls() -> Iterator[tuple[_Block, Any, Encoder, list[str]]]:
            nonlocal done, taken_over
            for embeddings in every:
                for number in range(len(embeddings)):
                    start, stop = embeddings.bounds(number)
                    texts = _texts(corpus, embeddings.name, start, stop)
                    block = _block(embeddings, number, texts, encoder)
                    if embeddings.holds(number, block.identity):
                        done += stop - start
                        continue
                    block = _with_known(block, cache)
                    taken_over += len(block.known)
                    if not block.missing:
                        block.write({})
                        done += stop - start
                        continue
                    yield block, _encode, encoder, [block.texts[key] for key in block.missing]

        for block, vectors in context.map(pool, calls()):
            computed = dict(zip(block.missing, vectors, strict=True))
            block.write(computed)
            cache.put({key: _row(vector) for key, vector in computed.items()})
            done += len(block.keys)
            context.advance(done, f"{taken_over} known from other runs" if taken_over else "")


def encode_texts(
    context: StageContext, corpus: Corpus, settings: EncodeSettings, texts: Sequence[str]
) -> Vectors:
    """Return the vectors of further texts, by the encoder of the stored ones.

    Raises:
        ConfigError: that encoder is missing or damaged.

    """
    if settings.model is not None:
        encoder: Encoder = sentence_encoder(settings)
    elif fitted_lsa(context.run_dir, _lsa_identity(corpus, settings)):
        encoder = LsaEncoder.stored(context.run_dir)
    else:  # another fit would have other axes
        raise ConfigError(
            f"{LsaEncoder.path(context.run_dir)}: the encoder of the stored vectors is missing or "
            "damaged; run the configuration in another run directory"
        )
    name = f"{context.stage.name}/vectors"
    vectors: Vectors = context.call(
        name, _encode, encoder, texts, on_gpu=settings.model is not None and settings.gpus != 0
    )
    return vectors


def _encoder(context: StageContext, corpus: Corpus, settings: EncodeSettings) -> Encoder:
    """Return the encoder; fit it to the documents and the classes if necessary."""
    if settings.model is not None:
        return sentence_encoder(settings)
    identity = _lsa_identity(corpus, settings)
    if not fitted_lsa(context.run_dir, identity):
        count = min(settings.fit_documents, len(corpus.train))
        rows = np.unique(np.linspace(0, len(corpus.train) - 1, count).astype(np.int64))
        texts = corpus.train.take(rows).text_list(0, len(rows)) + corpus.taxonomy.descriptions()
        arguments = (texts, settings, identity, context.run_dir)
        dimensions = context.call("encode/fit", fit_lsa, *arguments)
        context.say(f"lsa of {len(texts)} texts: {dimensions} dimensions")
    return LsaEncoder.stored(context.run_dir)


def _lsa_identity(corpus: Corpus, settings: EncodeSettings) -> str:
    """Return the fingerprint of the settings and texts that LSA is fitted to."""
    names = {"dimensions", "max_features", "fit_documents", "seed"}
    fit = settings.model_dump(mode="json", include=names)
    return fingerprint({"lsa": fit, "data": corpus.identity()})


def _texts(corpus: Corpus, name: str, start: int, stop: int) -> list[str]:
    if name == "classes":
        return corpus.taxonomy.descriptions()[start:stop]
    if name == "names":
        return [text.replace("_", " ") for text in corpus.taxonomy.names[start:stop]]
    return corpus.documents(name).text_list(start, stop)


def _block(embeddings: Embeddings, number: int, texts: Sequence[str], encoder: Encoder) -> _Block:
    keys = [hashlib.sha256(f"{encoder.fingerprint} {text}".encode()).hexdigest() for text in texts]
    identity = hashlib.sha256(" ".join(keys).encode()).hexdigest()
    named = dict(zip(keys, texts, strict=True))
    return _Block(embeddings, number, identity, named, keys, {})


def _with_known(block: _Block, cache: Cache) -> _Block:
    known = {
        key: np.frombuffer(base64.b85decode(row["vector"]), np.float32)
        for key, row in cache.get(block.texts).items()
    }
    return replace(block, known=known)


def _row(vector: Vectors) -> Row:
    return {"vector": base64.b85encode(vector.tobytes()).decode()}


def _encode(encoder: Encoder, texts: Sequence[str]) -> Vectors:
    """Task: encode a block of texts."""
    return encoder.encode(texts)
