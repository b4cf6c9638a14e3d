"""Phase 1: every text becomes a vector, block by block, on as many workers as there are."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.embeddings import Embeddings, Vectors
from experiments.teleclass.encoders import (
    Encoder,
    LsaEncoder,
    fit_lsa,
    fitted_lsa,
    sentence_encoder,
)
from experiments.teleclass.settings import EncodeSettings
from experiments.teleclass.tasks import pool_options
from raypipe.errors import ConfigError
from raypipe.pipeline.context import Call, StageContext
from raypipe.pipeline.identity import fingerprint
from raypipe.storage.cache import Cache
from raypipe.storage.ledger import Row
from raypipe.storage.run_directory import RunDirectory


@dataclass(frozen=True)
class _Block:
    """A block of texts that waits for the vectors it lacks; equal texts have one."""

    embeddings: Embeddings
    number: int
    identity: str
    texts: Mapping[str, str]
    keys: Sequence[str]
    known: Mapping[str, Vectors]

    @property
    def missing(self) -> list[str]:
        """The keys of the texts that are to be encoded."""
        return [key for key in self.texts if key not in self.known]

    def write(self, computed: Mapping[str, Vectors]) -> None:
        vectors = {**self.known, **computed}
        self.embeddings.write(
            self.number, np.stack([vectors[key] for key in self.keys]), self.identity
        )


def text_sets(corpus: Corpus) -> dict[str, int]:
    """What is encoded, by name: how many texts each set has."""
    classes = len(corpus.taxonomy.ids)
    sets = {"train": len(corpus.train), "classes": classes, "names": classes}
    return sets if corpus.test is None else {**sets, "test": len(corpus.test)}


def embeddings_of(
    run: RunDirectory, corpus: Corpus, settings: EncodeSettings, name: str
) -> Embeddings:
    """The stored vectors of a set of texts."""
    return Embeddings(run, name, text_sets(corpus)[name], settings.block)


def encode(context: StageContext, corpus: Corpus, settings: EncodeSettings) -> None:
    """Encode the documents, the classes and their names; blocks that are stored are kept.

    Raises:
        UnitError: a task failed for good; the blocks of the others are stored.

    """
    encoder = _encoder(context, corpus, settings)
    every = [embeddings_of(context.run_dir, corpus, settings, name) for name in text_sets(corpus)]
    total = sum(embeddings.rows for embeddings in every)
    done = taken_over = 0
    waiting: dict[str, _Block] = {}
    context.begin(total)

    with (
        Cache("embeddings", enabled=settings.cache) as cache,
        context.pool(pool_options(context, settings, neural=settings.model is not None)) as pool,
    ):

        def calls() -> Iterator[Call]:
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
                    name = f"encode/{embeddings.name}/{number}"
                    waiting[name] = block
                    yield name, _encode, encoder, [block.texts[key] for key in block.missing]

        for name, vectors in context.map(pool, calls()):
            block = waiting.pop(name)
            computed = dict(zip(block.missing, vectors, strict=True))
            block.write(computed)
            cache.put({key: _row(vector) for key, vector in computed.items()})
            done += len(block.keys)
            context.advance(done, f"{taken_over} known from other runs" if taken_over else "")


def encode_texts(
    context: StageContext, corpus: Corpus, settings: EncodeSettings, texts: Sequence[str]
) -> Vectors:
    """The vectors of further texts, by the encoder that the stored ones are of.

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
    """The encoder, fitted to the documents and the classes where it has to be."""
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
    """What an encoder is fitted to, and how."""
    decisive = settings.model_dump(
        mode="json", include={"dimensions", "max_features", "fit_documents", "seed"}
    )
    return fingerprint({"lsa": decisive, "data": corpus.identity()})


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
    """The task."""
    return encoder.encode(texts)
