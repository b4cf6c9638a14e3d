"""Export of the trained model and its tokenizer to Hugging Face's ``transformers``."""

from __future__ import annotations

from experiments.summarization.evaluation import load_model
from experiments.summarization.pretrained import export
from experiments.summarization.settings import SummarizationModelSettings
from experiments.summarization.tokenize_stage import tokenizer_of
from raypipe.graph.context import StageContext
from raypipe.store.run_directory import RunDirectory


def run_export(context: StageContext) -> None:
    """Write the trained model and its tokenizer to ``artifacts/export``."""
    context.call("export", export_model, context.run_dir, context.settings.model)
    context.say(f"the model and its tokenizer: {context.run_dir.artifact('export')}")


def export_model(run_dir: RunDirectory, model: SummarizationModelSettings) -> None:
    """Write a run's trained model and tokenizer to its directory."""
    network = load_model(run_dir, model)
    export(network, model.sizes, tokenizer_of(run_dir).content, run_dir, run_dir.artifact("export"))
