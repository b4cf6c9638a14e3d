"""The stages of language-model pretraining."""

from __future__ import annotations

from experiments.lm_pretrain.evaluation import evaluate
from experiments.lm_pretrain.export import export
from experiments.lm_pretrain.model import LmSettings
from experiments.lm_pretrain.packed import PackedTokens
from experiments.lm_pretrain.sampling import sample
from experiments.lm_pretrain.settings import PretrainingSettings
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.text import text_identity
from experiments.lm_pretrain.tokenise import tokenise
from experiments.lm_pretrain.training import LanguageModelTask, RandomTokens
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.identity import fingerprint
from raypipe.pipeline.stages import hardware_stage, train_stage
from raypipe.storage.run_directory import RunDirectory

#: part of every unit's identity; raised when results change
VERSION = 1


def stages(settings: PretrainingSettings) -> list[Stage]:
    """Hardware and the training; around it, where there is text, its tokens, measures, a sample.

    Raises:
        CorpusError: files that are not there.

    """
    model, data = settings.model, settings.data
    plain = {"version": VERSION, "model": model.model_dump(mode="json")}

    def random_task(run: RunDirectory | None) -> LanguageModelTask:
        del run
        size = (model.vocabulary, model.context)
        return LanguageModelTask(
            model,
            RandomTokens(*size, data.samples, data.seed),
            RandomTokens(*size, data.held_out, data.seed, held_out=True),
        )

    if data.source == "random":
        identity = {**plain, "data": data.decisive()}
        return [hardware_stage(), train_stage("train", settings.train, random_task, identity)]

    def text_task(run: RunDirectory | None) -> LanguageModelTask:
        if run is None:
            return random_task(run)
        folder = run_folder(run)
        folder.check()
        folder.tokenizer().encode(settings.sample.prompt)  # refused now, not after the training
        return LanguageModelTask(
            _of_run(run, settings),
            PackedTokens(folder, "train", model.context),
            PackedTokens(folder, "held_out", model.context),
        )

    text = {"version": VERSION, "data": {**data.decisive(), **text_identity(data)}}
    if data.tokens == "bpe":
        text["vocabulary"] = model.vocabulary
    tokenising = Unit("tokenise", text)
    after = {"tokenise": fingerprint(text)}
    training = train_stage("train", settings.train, text_task, {**plain, **after}, ("tokenise",))
    trained = {"train": fingerprint(training.units[0].identity)}
    measuring = Unit("evaluate", trained)
    sampling = Unit("sample", {**trained, "sample": settings.sample.model_dump(mode="json")})
    exporting = Unit("export", trained)
    on_gpu = settings.train.scaling.gpus_per_worker != 0

    def run_tokenise(context: StageContext) -> None:
        tokenise(context, data, model.vocabulary, model.context, text)
        context.finish(tokenising)

    def run_evaluate(context: StageContext) -> None:
        evaluate(context, _of_run(context.run_dir, settings), training.name, on_gpu=on_gpu)
        context.finish(measuring)

    def run_sample(context: StageContext) -> None:
        found = _of_run(context.run_dir, settings)
        sample(context, found, training.name, settings.sample, on_gpu=on_gpu)
        context.finish(sampling)

    def run_export(context: StageContext) -> None:
        folder = context.run_dir.artifact("export", "hf")
        found = _of_run(context.run_dir, settings)
        context.call("export", export, context.run_dir, found, training.name, folder)
        context.say(f"for AutoModelForCausalLM.from_pretrained: {folder}")
        context.finish(exporting)

    tokens = f"at most {settings.sample.tokens} tokens"
    everything = [
        hardware_stage(),
        Stage("tokenise", run_tokenise, [tokenising], ("hardware",), "the whole text"),
        training,
        Stage("evaluate", run_evaluate, [measuring], ("train",), "held-out text", on_gpu=on_gpu),
        Stage("sample", run_sample, [sampling], ("train",), tokens, on_gpu=on_gpu),
    ]
    if settings.export:
        everything.append(Stage("export", run_export, [exporting], ("train",), "the model's files"))
    return everything


def _of_run(run: RunDirectory, settings: PretrainingSettings) -> LmSettings:
    """The model of a run: characters and bytes are as many as the text has."""
    if settings.data.tokens == "bpe":
        return settings.model
    return settings.model.model_copy(update={"vocabulary": run_folder(run).index().vocabulary})
