"""Classify unlabeled texts into a taxonomy (TELEClass), and compare with the most similar class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.teleclass.augment import generated_files, run_augment
from experiments.teleclass.baselines import run_baselines
from experiments.teleclass.corpus import LabeledCorpus, load, read_annotations
from experiments.teleclass.encode import run_encode
from experiments.teleclass.encoders import model_identity
from experiments.teleclass.figures import sections
from experiments.teleclass.generators import load_generator
from experiments.teleclass.infer import run_infer
from experiments.teleclass.refine import run_refine
from experiments.teleclass.settings import TeleclassSettings
from experiments.teleclass.tables import STEP_METRICS, TABLES
from experiments.teleclass.training import build_task
from experiments.teleclass.training_set import make_tokenizer, run_hierarchy, run_tokenize
from raypipe import ConfigError, Experiment, Stage, Unit, fingerprint, hardware_stage, train_stage

#: keys of `train.classifier` that decide what the tokenize stage writes
_TOKENS = tuple(
    f"train.classifier.{name}" for name in ("pretrained", "length", "vocabulary", "vectors")
)
#: keys of `refine` that decide how many labels infer predicts
_LABELS = ("refine.min_labels", "refine.max_labels")


def stages(settings: TeleclassSettings) -> list[Stage]:
    """Return the phases in their order; each needs the one before.

    Raises:
        ConfigError: files that cannot be used, a model or a generator that does not exist.

    """
    corpus = load(settings.data)
    encoder = _model_literal(settings.encode.model, "encode.model")
    classifier = _model_literal(settings.train.classifier.pretrained, "train.classifier.pretrained")
    _check(settings)
    labels, texts = _file_literals(settings, corpus)
    documents, predicted = len(corpus.train), len(corpus.documents(corpus.predicted))
    encoded = documents + predicted * (corpus.test is not None)
    rounds = f"{settings.refine.rounds} rounds over {documents} documents"
    on_gpu = settings.encode.model is not None and settings.encode.gpus != 0
    content = {"content": corpus.identity()}
    return [
        hardware_stage(),
        Stage(
            "encode",
            partial(run_encode, corpus),
            [Unit("encode", {**content, **encoder})],
            ("hardware",),
            workload=f"{encoded} documents",
            on_gpu=on_gpu,
        ),
        Stage(
            "baselines",
            partial(run_baselines, corpus),
            [Unit("baselines/all")],
            ("encode",),
            ("encode",),
            f"{len(corpus.documents(corpus.predicted))} documents",
        ),
        Stage(
            "refine",
            partial(run_refine, corpus),
            [Unit("refine", labels)],
            ("encode",),
            ("data", "encode", "refine"),
            rounds,
        ),
        Stage(
            "augment",
            partial(run_augment, corpus),
            [Unit("augment", texts)],
            ("refine",),
            ("data", "augment"),
            on_gpu=bool(settings.augment.gpus),
        ),
        Stage("hierarchy", partial(run_hierarchy, corpus), needs=("augment",)),
        Stage(
            "tokenize",
            partial(run_tokenize, corpus),
            [Unit("tokenize", classifier)],
            ("hierarchy",),
            ("encode", *_TOKENS),
            f"at most {documents} documents",
        ),
        train_stage(
            "train",
            settings.train,
            partial(build_task, len(corpus.taxonomy)),
            ("tokenize",),
            ("encode.dimensions", "train"),
            classifier,
        ),
        Stage(
            "infer",
            partial(run_infer, corpus),
            needs=("train",),
            reads=("encode", *_LABELS, "infer", "train.classifier"),
            workload=f"{predicted} documents",
            on_gpu=settings.infer.gpus != 0,
        ),
    ]


def _model_literal(model: str | None, key: str) -> dict[str, str]:
    """Return the identity of a pretrained model. Raises ConfigError if it cannot be used."""
    if model is None:
        return {}
    return {"model": model_identity(model, key)}


def _check(settings: TeleclassSettings) -> None:
    """Refuse now what would fail only phases later. Raises ConfigError."""
    classifier = settings.train.classifier
    if classifier.pretrained is not None and Path(classifier.pretrained).is_dir():
        make_tokenizer((), classifier.pretrained, classifier.vocabulary, classifier.length)
    for name, section in (("encode", settings.encode), ("infer", settings.infer)):
        if name == "encode" and settings.encode.model is None:
            continue  # LSA has one precision
        if section.gpus == 0 and section.precision == "tf32":
            raise ConfigError(
                f"{name}.precision = tf32: CPUs lack it, and {name}.gpus = 0 "
                "(allowed there: fp32, bf16, fp16)"
            )


def _file_literals(
    settings: TeleclassSettings, corpus: LabeledCorpus
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the fingerprints of the files that refine and augment read. Raises ConfigError."""
    labels, texts = {}, {}
    if settings.refine.given is not None:
        path = (settings.data.dir or Path()) / settings.refine.given
        labels = {"given": fingerprint(read_annotations(path, corpus.taxonomy))}
    if settings.augment.source == "files":
        documents, classes = generated_files(settings.data, corpus, settings.augment)
        texts = {"texts": documents.fingerprint, "labels": fingerprint(classes)}
    elif settings.augment.source == "generator":
        load_generator(settings.augment.generator)
    return labels, texts


EXPERIMENT = Experiment(
    "teleclass",
    3,
    TeleclassSettings,
    stages,
    sections,
    tables=TABLES,
    step_metrics=STEP_METRICS,
)
