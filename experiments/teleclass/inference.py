"""Phase 6: the trained classifier labels the test documents on all workers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import nn

from experiments.teleclass.artifacts import label_lists, record_measures
from experiments.teleclass.classifier import restore_classifier
from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.data.taxonomy import Taxonomy
from experiments.teleclass.embeddings import Embeddings, Vectors
from experiments.teleclass.measures import Counts, count
from experiments.teleclass.refinement import ranked
from experiments.teleclass.settings import InferSettings
from experiments.teleclass.tasks import pool_options
from experiments.teleclass.tokens import tokenizer_path
from experiments.teleclass.training import NOTHING, Collate
from raypipe.datasets.bpe import token_lists
from raypipe.pipeline.context import Call, StageContext
from raypipe.storage.artifacts import read_parquet, write_parquet
from raypipe.storage.run_directory import RunDirectory
from raypipe.training import precision
from raypipe.training.weights import read_weights

Probabilities = NDArray[np.float32]
_IDENTITY, _COUNTS = b"identity", b"counts"


@dataclass(frozen=True)
class Predictor:
    """A trained classifier of a run directory and how it is asked; cheap to pickle."""

    run: RunDirectory
    trial_id: str
    settings: InferSettings

    def probabilities(self, texts: Sequence[str], vectors: Vectors | None) -> Probabilities:
        """The probability of each class ``[B, C]``, whatever the other texts are.

        ``vectors`` ``[B, d]`` are theirs of phase 1, for a classifier that reads them.
        """
        model, tokenizer, device = _loaded(self.run, self.trial_id)
        precision.check(self.settings.precision, device, "infer.precision")
        precision.configure(self.settings.precision)
        tokens = [each.values.to_numpy() for each in token_lists(tokenizer, texts)]
        order = np.argsort([len(each) for each in tokens], kind="stable")
        labels = np.empty(0, np.int32)
        collate = Collate(0)
        parts = []
        for start in range(0, len(order), self.settings.batch_size):
            rows = order[start : start + self.settings.batch_size]
            batch = collate(
                [(tokens[r], labels, NOTHING if vectors is None else vectors[r]) for r in rows]
            )
            inputs = [tensor.to(device) for tensor in batch[:-1]]
            with torch.inference_mode(), precision.autocast(self.settings.precision, device):
                logits = model(*inputs)
            parts.append(logits.float().sigmoid().cpu().numpy())
        sorted_ = np.concatenate(parts)
        found = np.empty_like(sorted_)
        found[order] = sorted_
        return found


def choose(
    probabilities: Probabilities, taxonomy: Taxonomy, settings: InferSettings
) -> sparse.csr_matrix:
    """The labels of documents, bool ``[B, C]``: with a class come all its ancestors.

    Those at or above the threshold, or the most probable class where there is none; or the
    ``top_k``.
    """
    if settings.top_k is not None:
        best = ranked(probabilities, min(settings.top_k, probabilities.shape[1]))
    else:
        best = probabilities.argmax(1)[:, None]
    chosen = np.zeros(probabilities.shape, bool)
    np.put_along_axis(chosen, best, True, 1)
    if settings.threshold is not None:
        chosen |= probabilities >= settings.threshold
    return taxonomy.closure(sparse.csr_matrix(chosen))


def infer(
    context: StageContext,
    corpus: Corpus,
    settings: InferSettings,
    vectors: Embeddings | None,
    trial_id: str,
    identity: str,
) -> None:
    """Predict the labels of the test documents, write them, measure them where there is gold.

    Blocks are stored as they come, and not computed again. ``vectors`` are those of phase 1, for a
    classifier that reads them.

    Raises:
        UnitError: a task failed for good; the blocks of the others are stored.

    """
    run, taxonomy = context.run_dir, corpus.taxonomy
    documents = corpus.documents(corpus.predicted)
    starts = range(0, len(documents), settings.block)
    context.begin(len(documents))
    predictor = Predictor(run, trial_id, settings)
    done = 0
    with context.pool(pool_options(context, settings, neural=True)) as pool:
        shared = pool.share((predictor, taxonomy, vectors))

        def calls() -> Iterator[Call]:
            nonlocal done
            for start in starts:
                stop = min(start + settings.block, len(documents))
                if _holds(run, _part_path(run, start), identity):
                    done += stop - start
                    continue
                gold = None if documents.gold is None else documents.gold[start:stop]
                texts = documents.text_list(start, stop)
                yield f"infer/{start}", _predict, shared, start, texts, gold

        for name, (labels, classes, scores, counts) in context.map(pool, calls()):
            start = int(name.rpartition("/")[2])
            part = _part(corpus, start, labels, classes, scores)
            about = {_IDENTITY: identity, _COUNTS: "" if counts is None else _to_json(counts)}
            write_parquet(run, _part_path(run, start), part.replace_schema_metadata(about))
            done += len(part)
            context.advance(done)
    _finish(context, corpus, [_part_path(run, start) for start in starts])


def _part(
    corpus: Corpus,
    start: int,
    labels: sparse.csr_matrix,
    classes: NDArray[np.int32],
    scores: Probabilities,
) -> pa.Table:
    """The predictions of a block: class ids, and the most probable classes with their scores."""
    names = np.array(corpus.taxonomy.ids, object)
    lists = label_lists(labels)
    documents = corpus.documents(corpus.predicted)
    return pa.table(
        {
            "id": documents.ids[start : start + labels.shape[0]],
            "labels": pa.ListArray.from_arrays(
                lists.offsets, pa.array(names[lists.values.to_numpy()], pa.string())
            ),
            "most_probable": pa.array(names[classes].tolist(), pa.list_(pa.string())),
            "probabilities": pa.array(scores.tolist(), pa.list_(pa.float32())),
        }
    )


def _finish(context: StageContext, corpus: Corpus, paths: Sequence[str]) -> None:
    """One table and one CSV file of all blocks, and the measures."""
    run = context.run_dir
    parts = [read_parquet(run, path) for path in paths]
    table = pa.concat_tables(part.replace_schema_metadata(None) for part in parts)
    ids = pa.array([context.session.run_id] * len(table), pa.string())
    write_parquet(run, run.partition("predictions"), table.add_column(0, "run_id", ids))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("id", "labels"))
    for batch in table.to_batches():
        labels = batch.column("labels").to_pylist()
        names = batch.column("id").to_pylist()
        writer.writerows((name, " ".join(each)) for name, each in zip(names, labels, strict=True))
    path = run.artifact("infer", "predictions.csv")
    run.write(path, stream.getvalue().encode())
    counts = [text for part in parts if (text := part.schema.metadata[_COUNTS].decode())]
    if counts:
        whole = _from_json(counts[0])
        for text in counts[1:]:
            whole += _from_json(text)
        record_measures(context, corpus.taxonomy, "classifier", corpus.predicted, whole)
    context.say(f"{len(table)} predictions: {path}")


def _predict(
    shared: tuple[Predictor, Taxonomy, Embeddings | None],
    start: int,
    texts: Sequence[str],
    gold: sparse.csr_matrix | None,
) -> tuple[sparse.csr_matrix, NDArray[np.int64], Probabilities, Counts | None]:
    """Task: the labels of a block, its most probable classes with their probabilities, measures."""
    predictor, taxonomy, stored = shared
    rows = np.arange(start, start + len(texts))
    probabilities = predictor.probabilities(
        texts, None if stored is None else stored.read_rows(rows)
    )
    labels = choose(probabilities, taxonomy, predictor.settings)
    best = ranked(probabilities, min(predictor.settings.scores, probabilities.shape[1]))
    counts = None if gold is None else count(probabilities, labels, gold, taxonomy.depth)
    return labels, best, np.take_along_axis(probabilities, best, 1), counts


@lru_cache(maxsize=1)
def _loaded(run: RunDirectory, trial_id: str) -> tuple[nn.Module, str, torch.device]:
    """The classifier of a run, its tokenizer, and the device it lies on; once in a process."""
    weights, metadata = read_weights(run, run.model(trial_id))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = restore_classifier(weights, metadata).to(device)
    return model, run.read(tokenizer_path(run)).decode(), device


def _to_json(counts: Counts) -> str:
    return json.dumps({f.name: getattr(counts, f.name).tolist() for f in fields(counts)})


def _from_json(text: str) -> Counts:
    return Counts(**{name: np.array(values) for name, values in json.loads(text).items()})


def _part_path(run: RunDirectory, start: int) -> str:
    return run.artifact("infer", f"{start:09d}.parquet")


def _holds(run: RunDirectory, path: str, identity: str) -> bool:
    """Whether a block is stored whole and by this classifier with these settings."""
    if not run.exists(path):
        return False
    try:
        table = read_parquet(run, path)
    except ValueError:
        return False
    return bool((table.schema.metadata or {}).get(_IDENTITY) == identity.encode())
