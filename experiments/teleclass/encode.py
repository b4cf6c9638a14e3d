"""Phase 1, encode: vectors of documents and classes, in blocks, on all workers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.teleclass.artifacts import pool_options
from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.encoders import (
    Embeddings,
    Vectors,
    embeddings_of,
    fit_lsa,
    stored_encoder,
    text_sets,
)
from experiments.teleclass.settings import EncodeSettings
from raypipe import Cache, StageContext


class _TextBlock(NamedTuple):
    """A block of texts by their cache keys, with the vectors of those that are known."""

    embeddings: Embeddings
    number: int
    keys: Sequence[str]
    known: dict[str, Vectors]
    missing: dict[str, str]

    def __str__(self) -> str:
        return f"encode/{self.embeddings.name}/{self.number}"

    def write(self) -> None:
        """Store the block once all vectors are known."""
        self.embeddings.write(self.number, np.stack([self.known[key] for key in self.keys]))


def run_encode(corpus: LabeledCorpus, context: StageContext) -> None:
    """Encode the documents, the classes and their names; equal texts once, and cached ones never.

    Raises:
        UnitError: a task failed for good; the vectors of the others are in the cache.

    """
    for name, part in (
        ("train", corpus.train),
        ("test", corpus.test),
        ("taxonomy", corpus.taxonomy),
    ):
        for reason, number in part.dropped.items() if part is not None else ():
            context.say(f"{name}: {reason}: {number}")
    settings: EncodeSettings = context.settings.encode
    if settings.model is None:
        _fit_lsa(corpus, context, settings)
    encoder = stored_encoder(context.run_dir, settings)
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
                    identities = (f"{encoder.fingerprint} {text}" for text in texts)
                    keys = [hashlib.sha256(text.encode()).hexdigest() for text in identities]
                    known = {
                        key: np.frombuffer(base64.b85decode(row["vector"]), np.float32)
                        for key, row in cache.get(dict.fromkeys(keys)).items()
                    }
                    pairs = zip(keys, texts, strict=True)
                    missing = {key: text for key, text in pairs if key not in known}
                    block = _TextBlock(embeddings, number, keys, known, missing)
                    cached += len(known)
                    if missing:
                        yield block, encoder.encode, list(missing.values())
                    else:
                        block.write()
                        done += len(keys)

        for block, vectors in context.map(pool, calls()):
            computed = dict(zip(block.missing, vectors, strict=True))
            block.known.update(computed)
            block.write()
            rows = {key: base64.b85encode(v.tobytes()).decode() for key, v in computed.items()}
            cache.put({key: {"vector": text} for key, text in rows.items()})
            done += len(block.keys)
            context.advance(done, f"{cached} known from other runs" if cached else "")


def _fit_lsa(corpus: LabeledCorpus, context: StageContext, settings: EncodeSettings) -> None:
    """Fit LSA to an even sample of the documents and to the classes."""
    count = min(settings.fit_documents, len(corpus.train))
    rows = np.unique(np.linspace(0, len(corpus.train) - 1, count).astype(np.int64))
    texts = corpus.train.take(rows).text_list(0, len(rows)) + corpus.taxonomy.descriptions()
    dimensions = context.call("encode/fit", fit_lsa, texts, settings, context.run_dir)
    context.say(f"lsa of {len(texts)} texts: {dimensions} dimensions")


def _texts(corpus: LabeledCorpus, name: str, start: int, stop: int) -> list[str]:
    if name == "classes":
        return corpus.taxonomy.descriptions()[start:stop]
    if name == "names":
        return [text.replace("_", " ") for text in corpus.taxonomy.names[start:stop]]
    return corpus.documents(name).text_list(start, stop)
