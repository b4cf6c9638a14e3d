"""Phase 6, infer: label the documents with the trained classifier, on all workers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import nn

from experiments.common.evaluation import task_device
from experiments.common.tokenizer import read_tokenizer, token_lists
from experiments.teleclass.artifacts import label_lists, pool_options
from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.documents import Documents
from experiments.teleclass.encoders import Embeddings, Vectors, embeddings_of
from experiments.teleclass.evaluation import Counts, count, record_measures
from experiments.teleclass.model import restore_classifier
from experiments.teleclass.refinement import (
    NEVER,
    ClassVectors,
    best_labels,
    cut_at_gap,
    label_sets,
    ranked,
)
from experiments.teleclass.settings import InferSettings, takes_vectors
from experiments.teleclass.taxonomy import Taxonomy
from experiments.teleclass.training import NOTHING, Collate
from raypipe import RunDirectory, StageContext, artifacts, precision, weights

Probabilities = NDArray[np.float32]
_COUNTS = b"counts"


@dataclass(frozen=True)
class TrainedClassifier:
    """A trained classifier of a run directory with the settings of inference; cheap to pickle."""

    run_dir: RunDirectory
    trial_id: str
    settings: InferSettings

    def probabilities(self, texts: Sequence[str], vectors: Vectors | None) -> Probabilities:
        """Return the probability of each class ``[B, C]``, independent of the other texts.

        ``vectors`` ``[B, d]`` are the texts' vectors of phase 1, if the classifier reads them.
        """
        model, tokenizer, device = _loaded(self.run_dir, self.trial_id)
        precision.check(self.settings.precision, device, "infer.precision")
        precision.configure(self.settings.precision)
        tokens = [ids.values.to_numpy() for ids in token_lists(tokenizer, texts)]
        order = np.argsort([len(ids) for ids in tokens], kind="stable")
        collate, no_labels = Collate(0), np.empty(0, np.int32)
        parts = []
        for start in range(0, len(order), self.settings.batch_size):
            rows = order[start : start + self.settings.batch_size]
            samples = [
                (tokens[row], no_labels, NOTHING if vectors is None else vectors[row])
                for row in rows
            ]
            inputs = [tensor.to(device) for tensor in collate(samples)[:-1]]
            with torch.inference_mode(), precision.autocast(self.settings.precision, device):
                logits = model(*inputs)
            parts.append(logits.float().sigmoid().cpu().numpy())
        probabilities = np.concatenate(parts)
        return probabilities[np.argsort(order)]


@dataclass(frozen=True)
class _InferInputs:
    """Inputs that all tasks share."""

    predictor: TrainedClassifier
    taxonomy: Taxonomy
    vectors: Embeddings
    takes_vectors: bool
    classes: ClassVectors | None
    similarity: float
    #: fewest and most labels before the ancestors
    labels: tuple[int, int]


def choose(
    scores: Probabilities, taxonomy: Taxonomy, settings: InferSettings, least: int, most: int
) -> sparse.csr_matrix:
    """Return the labels of documents, bool ``[B, C]``, with all ancestors.

    With a threshold, classes at or above it, or the best class if there is none; otherwise the
    classes before the largest gap, ``least`` to ``most`` of them.
    """
    if settings.threshold is None:
        labels, _ = cut_at_gap(*best_labels(scores, most), least)
        return taxonomy.closure(label_sets(labels, len(taxonomy)))
    chosen = scores >= settings.threshold
    chosen[np.arange(len(scores)), scores.argmax(1)] = True
    return taxonomy.closure(sparse.csr_matrix(chosen))


def run_infer(corpus: LabeledCorpus, context: StageContext) -> None:
    """Predict the labels of the documents, store them, measure them if there are gold labels.

    Blocks are stored as they are predicted, and not computed again.

    Raises:
        UnitError: a task failed for good; the blocks of the others are stored.

    """
    settings, run_dir = context.settings.infer, context.run_dir
    documents = corpus.documents(corpus.predicted)
    similarity = settings.similarity if settings.threshold is None else 0.0
    inputs = _InferInputs(
        TrainedClassifier(run_dir, "train", settings),
        corpus.taxonomy,
        embeddings_of(run_dir, corpus, context.settings.encode, corpus.predicted),
        takes_vectors(context.settings.train.classifier),
        ClassVectors.read(run_dir) if similarity else None,
        similarity,
        (context.settings.refine.min_labels, context.settings.refine.max_labels),
    )
    starts = range(0, len(documents), settings.block)
    # blocks of other settings, or of another size, have other names
    folder = f"{context.stage.units[0].fingerprint}-{settings.block}"
    paths = {start: run_dir.artifact("infer", folder, f"{start:09d}.parquet") for start in starts}
    context.begin(len(documents))
    done = 0
    with context.pool(pool_options(context, settings, neural=True)) as pool:
        shared = pool.share(inputs)

        def calls() -> Iterator[tuple[Any, ...]]:
            nonlocal done
            for start in starts:
                rows = np.arange(start, min(start + settings.block, len(documents)))
                if run_dir.exists(paths[start]):
                    done += len(rows)
                else:
                    yield start, _predict, shared, rows, documents.take(rows)

        for start, part in context.map(pool, calls()):
            artifacts.write_parquet(run_dir, paths[start], part)
            done += len(part)
            context.advance(done)
    _finish(context, corpus, list(paths.values()))


def _finish(context: StageContext, corpus: LabeledCorpus, paths: Sequence[str]) -> None:
    """Write all blocks as one table and one CSV file, and the measures."""
    run_dir = context.run_dir
    parts = [artifacts.read_parquet(run_dir, path) for path in paths]
    table = pa.concat_tables(part.replace_schema_metadata(None) for part in parts)
    session = context.session
    added = {"run_id": session.run_id, "variant": run_dir.variant, "command_id": session.command_id}
    for place, (name, value) in enumerate(added.items()):
        table = table.add_column(place, name, pa.array([value] * len(table), pa.string()))
    artifacts.write_parquet(run_dir, run_dir.partition("predictions"), table)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("id", "labels"))
    for batch in table.select(["id", "labels"]).to_batches():
        writer.writerows((row["id"], " ".join(row["labels"])) for row in batch.to_pylist())
    path = run_dir.artifact("infer", "predictions.csv")
    run_dir.write(path, stream.getvalue().encode())
    counts = [text for part in parts if (text := part.schema.metadata[_COUNTS].decode())]
    if counts:
        total = reduce(add, map(Counts.from_json, counts))
        record_measures(context, corpus.taxonomy, "classifier", corpus.predicted, total)
    context.say(f"{len(table)} predictions: {path}")


def _predict(inputs: _InferInputs, rows: NDArray[np.int64], part: Documents) -> pa.Table:
    """Task: return the predictions of a block, with the sums of its measures as metadata."""
    predictor, taxonomy = inputs.predictor, inputs.taxonomy
    vectors = inputs.vectors.read_rows(rows)
    own = vectors if inputs.takes_vectors else None
    scores = probabilities = predictor.probabilities(part.texts.to_pylist(), own)
    if inputs.classes is not None:
        similar = inputs.classes.similarities(vectors)
        similar = np.where(similar > NEVER, similar, 0)  # without a vector: the probability alone
        scores = probabilities + np.float32(inputs.similarity) * similar
    labels = choose(scores, taxonomy, predictor.settings, *inputs.labels)
    best = ranked(probabilities, min(predictor.settings.scores, probabilities.shape[1]))
    names, lists = np.array(taxonomy.ids, object), label_lists(labels)
    predicted = pa.array(names[lists.values.to_numpy()], pa.string())
    likely = np.take_along_axis(probabilities, best, 1).tolist()
    table = pa.table(
        {
            "id": part.ids,
            "labels": pa.ListArray.from_arrays(lists.offsets, predicted),
            "most_probable": pa.array(names[best].tolist(), pa.list_(pa.string())),
            "probabilities": pa.array(likely, pa.list_(pa.float32())),
        }
    )
    counts = "" if part.gold is None else count(scores, labels, part.gold, taxonomy.depth).to_json()
    return table.replace_schema_metadata({_COUNTS: counts})


@lru_cache(maxsize=1)
def _loaded(run_dir: RunDirectory, trial_id: str) -> tuple[nn.Module, str, torch.device]:
    """Return the classifier of a run, its tokenizer and its device; loaded once per process."""
    state, metadata = weights.read_weights(run_dir, run_dir.model(trial_id))
    device = task_device()
    model = restore_classifier(state, metadata).to(device)
    return model, read_tokenizer(run_dir), device
