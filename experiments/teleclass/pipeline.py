"""The stages of TELEClass: its six phases, what they have to beat, and the tokens between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.teleclass.augmentation import augment, generated_files, load_generator
from experiments.teleclass.baselines import measure_baselines
from experiments.teleclass.data.annotations import read_annotations
from experiments.teleclass.data.corpus import Corpus, load
from experiments.teleclass.encoders import model_identity, need_nlp
from experiments.teleclass.encoding import embeddings_of, encode
from experiments.teleclass.hierarchy import add_ancestors
from experiments.teleclass.inference import infer
from experiments.teleclass.refine import refine
from experiments.teleclass.settings import TeleclassSettings
from experiments.teleclass.tokens import pretrained_tokenizer, tokenise
from experiments.teleclass.training import TeleclassTask, build_task
from raypipe.config.settings import Settings
from raypipe.errors import ConfigError
from raypipe.hardware import supported_precisions
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.identity import fingerprint
from raypipe.pipeline.stages import hardware_stage, train_stage
from raypipe.storage.run_directory import RunDirectory

#: part of every unit's identity; raised when results change
VERSION = 1

#: how a phase is spread over workers and what its tasks hold: no part of a result
_SPREAD = {"workers", "cpus", "gpus", "time_limit_s", "cache", "batch_size"}


def stages(settings: TeleclassSettings) -> list[Stage]:
    """The phases, each a stage that needs the one before.

    Raises:
        ConfigError: files that cannot be used, a model or a generator that is not there.

    """
    corpus = load(settings.data)
    s = settings
    encoder = _model(s.encode.model, "encode.model")
    tokens = _model(s.train.classifier.pretrained, "train.classifier.pretrained")
    _check(settings)
    given, written = _files(settings, corpus)
    documents, predicted = len(corpus.train), len(corpus.documents(corpus.predicted))
    data = {"version": VERSION, "data": corpus.identity()}

    def run_encode(context: StageContext) -> None:
        for name in ("train", "test") if corpus.test else ("train",):
            for reason, number in corpus.documents(name).dropped.items():
                context.say(f"{name}: {reason}: {number}")
        for reason, number in corpus.taxonomy.dropped.items():
            context.say(f"taxonomy: {reason}: {number}")
        encode(context, corpus, s.encode)

    encoding = _phase(
        "encode",
        run_encode,
        data | _decisive("encode", s.encode, encoder),
        [],
        cost=f"{documents + predicted * (corpus.test is not None)} documents",
        on_gpu=s.encode.model is not None and s.encode.gpus != 0,
    )
    baselines = _phase(
        "baselines", lambda context: measure_baselines(context, corpus, s.encode), {}, [encoding]
    )
    refining = _phase(
        "refine",
        lambda context: refine(context, s.data, corpus, s.encode, s.refine),
        _decisive("refine", s.refine, given),
        [encoding],
        cost=f"{s.refine.rounds} rounds over {documents} documents",
    )
    augmenting = _phase(
        "augment",
        lambda context: augment(context, s.data, corpus, s.augment),
        _decisive("augment", s.augment, written),
        [refining],
        on_gpu=bool(s.augment.gpus),
    )
    hierarchy = _phase(
        "hierarchy", lambda context: add_ancestors(context, corpus), {}, [augmenting]
    )
    classifier, classes = s.train.classifier, len(corpus.taxonomy)
    tokenising = _phase(
        "tokenise",
        lambda context: tokenise(context, corpus, s.encode, classifier),
        {"tokens": tokens, "length": classifier.length, "vocabulary": classifier.vocabulary}
        | {"vectors": classifier.takes_vectors},
        [hierarchy],
        cost=f"at most {documents} documents",
    )

    def task(run: RunDirectory | None) -> TeleclassTask:
        return build_task(run, settings, classes)

    model = classifier.model_dump(mode="json", exclude={"pretrained"})
    trained = {"train.classifier": {**model, **tokens}, "train.held_out": s.train.held_out}
    training = train_stage(
        "train", s.train, task, {**trained, **_after([tokenising])}, ("tokenise",)
    )

    def run_infer(context: StageContext) -> None:
        vectors = None
        if classifier.takes_vectors:
            vectors = embeddings_of(context.run_dir, corpus, s.encode, corpus.predicted)
        identity = fingerprint(inference.units[0].identity)
        infer(context, corpus, s.infer, vectors, training.name, identity)

    inference = _phase(
        "infer",
        run_infer,
        _decisive("infer", s.infer, {}),
        [training],
        cost=f"{predicted} documents",
        on_gpu=s.infer.gpus != 0,
    )
    return [
        hardware_stage(),
        encoding,
        baselines,
        refining,
        augmenting,
        hierarchy,
        tokenising,
        training,
        inference,
    ]


def _phase(
    name: str,
    work: Callable[[StageContext], None],
    decisive: dict[str, Any],
    before: Sequence[Stage],
    *,
    cost: str = "",
    on_gpu: bool = False,
) -> Stage:
    """A stage of one unit that depends on the stages before it."""
    unit = Unit(name, {**decisive, **_after(before)})

    def run(context: StageContext) -> None:
        work(context)
        context.finish(unit)

    needs = tuple(stage.name for stage in before) or ("hardware",)
    return Stage(name, run, [unit], needs, cost, on_gpu=on_gpu)


def _after(before: Sequence[Stage]) -> dict[str, str]:
    """The identity of what a stage works on: of the stages before it."""
    return {stage.name: fingerprint(stage.units[0].identity) for stage in before}


def _decisive(name: str, settings: Settings, more: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide a phase's result, beside what their paths lead to."""
    plain = settings.model_dump(mode="json", exclude=_SPREAD | {"model", "given"})
    return {name: {**plain, **more}}


def _model(model: str | None, key: str) -> dict[str, str]:
    """What a pretrained model is. Raises ConfigError where it or its library is not there."""
    if model is None:
        return {}
    need_nlp(f"{key} = {model}")
    return {"model": model_identity(model, key)}


def _check(settings: TeleclassSettings) -> None:
    """What would fail only phases later, as far as it is known. Raises ConfigError."""
    classifier = settings.train.classifier
    if classifier.pretrained is not None and Path(classifier.pretrained).is_dir():
        pretrained_tokenizer(classifier.pretrained, classifier.length)
    allowed = supported_precisions(None)
    for name, section in (("encode", settings.encode), ("infer", settings.infer)):
        if name == "encode" and settings.encode.model is None:
            continue  # lsa has one precision
        if section.gpus == 0 and section.precision not in allowed:
            raise ConfigError(
                f"{name}.precision = {section.precision}: CPUs lack it, and {name}.gpus = 0 "
                f"(allowed there: {', '.join(allowed)})"
            )


def _files(settings: TeleclassSettings, corpus: Corpus) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of the files that phases 2 and 3 read. Raises ConfigError for what is wrong."""
    given, written = {}, {}
    if settings.refine.given is not None:
        path = (settings.data.dir or Path()) / settings.refine.given
        given = {"given": fingerprint(read_annotations(path, corpus.taxonomy))}
    if settings.augment.source == "files":
        texts, labels = generated_files(settings.data, corpus, settings.augment)
        written = {"texts": texts.fingerprint, "labels": fingerprint(labels)}
    elif settings.augment.source == "generator":
        load_generator(settings.augment.generator)
    return given, written
