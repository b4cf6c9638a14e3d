"""Evaluation on held-out documents: summaries of the trained model, and extracted sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from experiments.common.blocks import map_blocks
from experiments.common.evaluation import load_trained, task_arithmetic, task_device
from experiments.summarization.baselines import (
    CONFIDENCE,
    baseline_scores,
    gains,
    lead,
    measured,
    score,
)
from experiments.summarization.generation import GenerationSettings, generate
from experiments.summarization.model import build_model
from experiments.summarization.settings import SummarizationModelSettings
from experiments.summarization.tables import MODEL, ROUGE
from experiments.summarization.tokenizer import read_documents, tokenizer_of
from experiments.summarization.training import pad_sources
from raypipe import RunDirectory, StageContext, precision

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

#: documents per task
_BLOCK = 64
#: documents in the table `summaries`
_SHOWN = 50


def run_evaluate(context: StageContext) -> None:
    """Record the measures of the model, its gains over the baselines, and the first summaries."""
    documents = read_documents(context.run_dir)
    texts, references = (documents.column(name).to_pylist() for name in ("text", "references"))
    summaries = _summaries(context, len(texts))
    scores, own = baseline_scores(context.run_dir), score(summaries, references)
    rows = measured(context, {MODEL: summaries}, {**scores, MODEL: own})
    context.ledger.put("measures", rows)
    compared = {baseline: gains(own - others) for baseline, others in scores.items()}
    for baseline, row in compared.items():
        shown = ", ".join(_gain(row, name) for name in ROUGE)
        context.say(f"{MODEL} - {baseline}: {shown} ({CONFIDENCE:.0%} bootstrap intervals)")
    about = {"documents": len(texts)}
    rows = {name: {"baseline": name, **about, **values} for name, values in compared.items()}
    context.ledger.put("gains", rows)
    first = {
        str(number): {
            "number": number,
            "document": texts[number],
            "references": json.dumps(references[number]),
            "summarizer": summaries[number],
            "lead_sentence": lead(texts[number], 1),
            **dict(zip(ROUGE, own[number].tolist(), strict=True)),
        }
        for number in range(min(_SHOWN, len(texts)))
    }
    context.ledger.put("summaries", first)


def load_model(
    run_dir: RunDirectory, model: SummarizationModelSettings
) -> T5ForConditionalGeneration:
    """Return a run's trained model for evaluation, on the CPU."""
    return load_trained(build_model(model.sizes), run_dir)


def summarize(
    run_dir: RunDirectory,
    model: SummarizationModelSettings,
    generation: GenerationSettings,
    arithmetic: precision.Precision,
    part: slice,
) -> list[str]:
    """Return the model's summaries of some held-out documents, on a GPU if the task has one."""
    device = task_device()
    network: torch.nn.Module = load_model(run_dir, model)
    sources = read_documents(run_dir).column("source").to_pylist()[part]
    inputs, mask = pad_sources([torch.tensor(source) for source in sources])
    with task_arithmetic(arithmetic):
        ids = generate(network.to(device), inputs.to(device), mask.to(device), generation)
    return tokenizer_of(run_dir).decode(ids)


def _gain(row: Mapping[str, Any], name: str) -> str:
    gain, low, high = (row[f"{name}_gain{end}"] for end in ("", "_low", "_high"))
    return f"{name} {gain:+.4f} [{low:+.4f}, {high:+.4f}]"


def _summaries(context: StageContext, documents: int) -> list[str]:
    """Return the summaries of all documents, in the arithmetic of the training."""
    settings = context.settings
    arguments = (context.run_dir, settings.model, settings.generation)
    arithmetic = settings.train.training.precision
    blocks = map_blocks(
        context,
        {"held_out": documents},
        _BLOCK,
        lambda block: (summarize, *arguments, arithmetic, slice(block.start, block.end)),
        on_gpus=context.stage.on_gpu,
    )
    return [text for _, texts in blocks for text in texts]
