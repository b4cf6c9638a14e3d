"""Evaluation on held-out documents: summaries of the trained model, and extracted sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from scipy import stats

from experiments.common.blocks import map_blocks
from experiments.common.evaluation import (
    load_trained,
    measure_rows,
    task_arithmetic,
    task_device,
)
from experiments.summarization.extractive import central, lead
from experiments.summarization.generation import GenerationSettings, generate
from experiments.summarization.model import build_model
from experiments.summarization.rouge import MEASURES, score
from experiments.summarization.settings import SummarizationModelSettings
from experiments.summarization.tokenize_stage import documents_path, tokenizer_of
from experiments.summarization.training import pad_sources
from raypipe.errors import ConfigError
from raypipe.graph.context import StageContext
from raypipe.hardware import Precision
from raypipe.store.artifacts import read_arrow, read_parquet, write_parquet
from raypipe.store.ledger import Row
from raypipe.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

MODEL = "summarizer"
LEAD = "lead sentence"
#: number of sentences of each baseline
LEADS = {LEAD: 1, "lead three sentences": 3}
CENTRAL = {"central sentence": 1, "central three sentences": 3}
BASELINES = (*LEADS, *CENTRAL)
#: documents per task
_BLOCK = 64
#: documents in the table `summaries`
_SHOWN = 50
_CONFIDENCE = 0.95
_RESAMPLES = 2000


def run_evaluate(context: StageContext) -> None:
    """Record the measures of the model and of the baselines, and the first summaries."""
    documents = read_documents(context.run_dir)
    texts, references = (documents.column(name).to_pylist() for name in ("text", "references"))
    summaries = {
        MODEL: _summaries(context, len(texts)),
        **{name: [lead(text, number) for text in texts] for name, number in LEADS.items()},
    }
    scores = {method: score(written, references) for method, written in summaries.items()}
    context.ledger.put("measures", _measured(context, summaries, scores))
    compared = {}
    for baseline, own in _baseline_scores(context.run_dir).items():
        compared[baseline] = gains(scores[MODEL] - own)
        shown = ", ".join(_gain(compared[baseline], name) for name in MEASURES)
        context.say(f"{MODEL} - {baseline}: {shown} ({_CONFIDENCE:.0%} bootstrap intervals)")
    about = {"documents": len(texts)}
    rows = {name: {"baseline": name, **about, **values} for name, values in compared.items()}
    context.ledger.put("gains", rows)
    first = {
        str(number): {
            "number": number,
            "document": texts[number],
            "references": json.dumps(references[number]),
            "summarizer": summaries[MODEL][number],
            "lead_sentence": summaries[LEAD][number],
            **dict(zip(MEASURES, scores[MODEL][number].tolist(), strict=True)),
        }
        for number in range(min(_SHOWN, len(texts)))
    }
    context.ledger.put("summaries", first)


def run_baselines(context: StageContext) -> None:
    """Record the measures of the central sentences, and the scores of all baselines.

    They need no trained model.
    """
    documents = read_documents(context.run_dir)
    texts, references = (documents.column(name).to_pylist() for name in ("text", "references"))
    found = context.call("baselines/central", central, texts, tuple(CENTRAL.values()))
    summaries = dict(zip(CENTRAL, found, strict=True))
    scores = {method: score(written, references) for method, written in summaries.items()}
    for name, number in LEADS.items():
        scores[name] = score([lead(text, number) for text in texts], references)
    context.ledger.put("measures", _measured(context, summaries, scores))
    columns = {name: pa.array(scores[name].tolist()) for name in BASELINES}
    write_parquet(context.run_dir, _scores_path(context.run_dir), pa.table(columns))


def _scores_path(run_dir: RunDirectory) -> str:
    return run_dir.artifact("baselines", "scores.parquet")


def _baseline_scores(run_dir: RunDirectory) -> dict[str, NDArray[np.float64]]:
    """Return the scores of the baselines on each held-out document ``[n, 3]``, by name."""
    table = read_parquet(run_dir, _scores_path(run_dir))
    return {name: np.array(table.column(name).to_pylist()) for name in table.column_names}


def _measured(
    context: StageContext,
    summaries: Mapping[str, Sequence[str]],
    scores: Mapping[str, NDArray[np.float64]],
) -> dict[str, Row]:
    """Return the rows of methods, with their gains over the lead sentence."""
    means = {
        method: dict(zip(MEASURES, scores[method].mean(0).tolist(), strict=True))
        for method in summaries
    }
    documents = len(scores[LEAD])
    rows = measure_rows(context, {"documents": documents}, means)
    for method, row in rows.items():
        row["words"] = _mean_words(summaries[method])
        if method != LEAD:
            row |= gains(scores[method] - scores[LEAD])
    return rows


def read_documents(run_dir: RunDirectory) -> pa.Table:
    """Return a run's held-out documents. Raises ConfigError if they are missing or damaged."""
    path = documents_path(run_dir)
    try:
        return read_arrow(run_dir, path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: a stage's result is missing or damaged ({error}); run the configuration in "
            "another run directory"
        ) from error


def load_model(
    run_dir: RunDirectory, model: SummarizationModelSettings
) -> T5ForConditionalGeneration:
    """Return a run's trained model for evaluation, on the CPU."""
    return load_trained(build_model(model.sizes), run_dir)


def summarize(
    run_dir: RunDirectory,
    model: SummarizationModelSettings,
    generation: GenerationSettings,
    arithmetic: Precision,
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


def gains(differences: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean gain of each measure over a baseline, with its interval.

    Args:
        differences: per document, ``[n, 3]``.

    Returns:
        ``<measure>_gain``, and ``_low`` and ``_high``: the 95 % percentile bootstrap over documents
        (Efron, Tibshirani 1993, An introduction to the bootstrap, section 13.3).

    """
    found: dict[str, float] = {}
    for name, column in zip(MEASURES, differences.T, strict=True):
        low = high = float(column.mean())
        if len(column) > 1:
            low, high = stats.bootstrap(
                (column,),
                np.mean,
                n_resamples=_RESAMPLES,
                confidence_level=_CONFIDENCE,
                method="percentile",
                rng=np.random.default_rng(0),
            ).confidence_interval
        found[f"{name}_gain"] = float(column.mean())
        found |= {f"{name}_gain_low": float(low), f"{name}_gain_high": float(high)}
    return found


def _gain(row: Mapping[str, Any], name: str) -> str:
    gain, low, high = (row[f"{name}_gain{end}"] for end in ("", "_low", "_high"))
    return f"{name} {gain:+.4f} [{low:+.4f}, {high:+.4f}]"


def _mean_words(texts: Sequence[str]) -> float:
    counts = pc.list_value_length(pc.utf8_split_whitespace(pa.array(texts, pa.large_string())))
    return float(pc.mean(counts).as_py())


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
