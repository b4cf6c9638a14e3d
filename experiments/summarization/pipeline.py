"""The stages of summarisation."""

from __future__ import annotations

from experiments.summarization.evaluation import evaluate, load_model
from experiments.summarization.model import require_transformers
from experiments.summarization.pairs import Data, load
from experiments.summarization.settings import ModelSettings, SummarizationSettings
from experiments.summarization.stored import RandomPairs, StoredPairs
from experiments.summarization.tokenise import tokenise, tokenizer_of
from experiments.summarization.training import SummarizationTask
from raypipe.context import StageContext
from raypipe.experiment import Stage, Unit
from raypipe.identity import fingerprint
from raypipe.paths import RunDirectory
from raypipe.stages import hardware_stage, train_stage

#: part of every unit's identity; raised when results change
VERSION = 2
#: samples of a task that has no data
_RANDOM_SAMPLES = 4096


def stages(settings: SummarizationSettings) -> list[Stage]:
    """Hardware, the tokens of both splits, the training, and the measures.

    Raises:
        ConfigError: documents that cannot be used, a model that is not the pretrained one, or
            ``transformers`` is not installed.

    """
    require_transformers()
    data, model = settings.data, settings.model
    pairs = load(data)
    encoded = {
        "version": VERSION,
        "data": {**data.decisive(), **data.encoding(), **pairs.identity},
        "tokenizer": model.pretrained or model.vocabulary,
    }
    tokenising = Unit("tokenise", encoded)
    identity = {
        "version": VERSION,
        "model": model.model_dump(mode="json"),
        "label_smoothing": settings.label_smoothing,
        "copying": settings.copying,
        "tokenise": fingerprint(encoded),
    }
    training = train_stage(
        "train",
        settings.train,
        lambda run: _task(settings, run),
        identity,
        ("tokenise",),
    )
    generation = settings.generation
    decisive = generation.model_dump(mode="json", exclude={"batch"})
    trained = fingerprint(training.units[0].identity)
    measuring = Unit("evaluate", {"train": trained, "generation": decisive})
    on_gpu = settings.train.scaling.gpus_per_worker != 0

    def run_tokenise(context: StageContext) -> None:
        tokenise(context, pairs, data, model)
        context.finish(tokenising)

    def run_evaluate(context: StageContext) -> None:
        evaluate(context, model, generation, training.name, on_gpu=on_gpu)
        context.finish(measuring)

    def run_export(context: StageContext) -> None:
        context.call("export", export_model, context.run, model, training.name)
        context.say(f"the model and its tokenizer: {context.run.artifact('export')}")
        context.finish(exporting)

    exporting = Unit("export", {"train": trained})
    export_stage = Stage("export", run_export, [exporting], ("train",), "one folder")
    return [
        hardware_stage(),
        Stage("tokenise", run_tokenise, [tokenising], ("hardware",), _cost(pairs)),
        training,
        Stage("evaluate", run_evaluate, [measuring], ("train",), _cost(pairs), on_gpu=on_gpu),
        *([export_stage] if settings.export else []),
    ]


def export_model(run: RunDirectory, model: ModelSettings, trial_id: str) -> None:
    """Task: the trained model of a run and its tokenizer, as ``transformers`` reads them."""
    from experiments.summarization.pretrained import export

    network = load_model(run, model, trial_id)
    export(network, model.sizes, tokenizer_of(run).content, run, run.artifact("export"))


def _task(settings: SummarizationSettings, run: RunDirectory | None) -> SummarizationTask:
    """Trains on a run's tokens; without a run on random ones, as long as any."""
    data, model = settings.data, settings.model
    samples: StoredPairs | RandomPairs
    held_out = None
    if run is None:
        lengths = (data.source_length, data.target_length)
        samples = RandomPairs(model.vocabulary, *lengths, _RANDOM_SAMPLES)
    else:
        samples = StoredPairs(run, "train", data.source_length)
        held_out = StoredPairs(run, "held_out", data.source_length)
    return SummarizationTask(
        model.sizes,
        samples,
        held_out,
        label_smoothing=settings.label_smoothing,
        copying=settings.copying,
        pretrained=model.pretrained,
    )


def _cost(pairs: Data) -> str:
    return f"{len(pairs.train)} documents to train on, {len(pairs.held_out)} held out"
