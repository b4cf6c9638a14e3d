"""The trained model's summaries of the held-out documents, beside the first sentences of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy import stats

from experiments.summarization.generation import GenerationSettings, generate
from experiments.summarization.model import build_model
from experiments.summarization.pairs import count_words
from experiments.summarization.rouge import MEASURES, lead, score
from experiments.summarization.settings import ModelSettings
from experiments.summarization.tokenise import documents_path, tokenizer_of
from experiments.summarization.training import pad_sources
from raypipe.artifacts import read_arrow
from raypipe.context import Call, StageContext
from raypipe.errors import ConfigError
from raypipe.launch.launcher import PoolOptions
from raypipe.paths import RunDirectory
from raypipe.training.weights import read_weights

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

MODEL = "summarizer"
LEAD = "lead sentence"
#: the baselines, and how many sentences each takes from the beginning
BASELINES = {LEAD: 1, "lead three sentences": 3}
#: documents a task
_BLOCK = 64
#: documents in the table `summaries`, the first
_SHOWN = 50
_CONFIDENCE = 0.95
_RESAMPLES = 2000


def evaluate(
    context: StageContext,
    model: ModelSettings,
    generation: GenerationSettings,
    trial_id: str,
    *,
    on_gpu: bool,
) -> None:
    """Rows of ``measures``, of the model and of the baselines, and of ``summaries``."""
    run = context.run
    documents = read_documents(run)
    texts, references = (documents.column(name).to_pylist() for name in ("text", "references"))
    baselines = {
        method: [lead(text, sentences) for text in texts] for method, sentences in BASELINES.items()
    }
    summaries = _written(context, model, generation, trial_id, len(texts), on_gpu)
    written = {MODEL: summaries, **baselines}
    scores = {method: score(own, references) for method, own in written.items()}
    rows: dict[str, dict[str, Any]] = {}
    for method, found in scores.items():
        means = dict(zip(MEASURES, found.mean(0).tolist(), strict=True))
        rows[method] = {"method": method, "documents": len(texts), **means}
        rows[method]["words"] = count_words(written[method])
        if method != LEAD:
            rows[method] |= over_lead(found - scores[LEAD])
        context.say(f"{method}: {', '.join(f'{k} {v:.4f}' for k, v in means.items())}")
    context.ledger.put("measures", rows)
    gains = ", ".join(_gain(rows[MODEL], name) for name in MEASURES)
    context.say(f"{MODEL} - {LEAD}: {gains} ({_CONFIDENCE:.0%} bootstrap intervals)")
    shown = {
        str(number): {
            "document": texts[number],
            "references": references[number],
            "summarizer": summaries[number],
            "lead_sentence": baselines[LEAD][number],
            **dict(zip(MEASURES, scores[MODEL][number].tolist(), strict=True)),
        }
        for number in range(min(_SHOWN, len(texts)))
    }
    context.ledger.put("summaries", shown)


def read_documents(run: RunDirectory) -> pa.Table:
    """The held-out documents of a run. Raises ConfigError: they are missing or damaged."""
    path = documents_path(run)
    try:
        return read_arrow(run, path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: a stage's result is missing or damaged ({error}); run the configuration in "
            "another run directory"
        ) from error


def load_model(
    run: RunDirectory, model: ModelSettings, trial_id: str
) -> T5ForConditionalGeneration:
    """The trained model of a run, on the CPU, for evaluation."""
    network = build_model(model.sizes)
    network.load_state_dict(read_weights(run, run.model(trial_id))[0])
    network.eval()
    return network


def summarise(
    run: RunDirectory,
    model: ModelSettings,
    generation: GenerationSettings,
    trial_id: str,
    part: slice,
) -> list[str]:
    """Task: what the trained model writes of some held-out documents, on a GPU if it has one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network: torch.nn.Module = load_model(run, model, trial_id)
    sources = read_documents(run).column("source").to_pylist()[part]
    inputs, mask = pad_sources([torch.tensor(source) for source in sources])
    ids = generate(network.to(device), inputs.to(device), mask.to(device), generation)
    return tokenizer_of(run).decode(ids)


def over_lead(differences: NDArray[np.float64]) -> dict[str, float]:
    """How much each measure is above the lead sentence's on average, and between which bounds.

    Args:
        differences: of each document, ``[n, 3]``.

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


def _written(
    context: StageContext,
    model: ModelSettings,
    generation: GenerationSettings,
    trial_id: str,
    number: int,
    on_gpu: bool,
) -> list[str]:
    """The summaries in the order of the documents: a GPU takes all, CPU tasks a block each."""
    arguments = (context.run, model, generation, trial_id)
    if on_gpu and any(node.gpus for node in context.session.nodes):
        found: list[str] = context.call(
            "evaluate", summarise, *arguments, slice(0, number), on_gpu=True
        )
        return found
    context.begin(number)

    def calls() -> Iterator[Call]:
        for start in range(0, number, _BLOCK):
            yield f"evaluate/{start}", summarise, *arguments, slice(start, start + _BLOCK)

    parts: dict[int, list[str]] = {}
    with context.pool(PoolOptions()) as pool:
        for key, texts in context.map(pool, calls()):
            parts[int(key.rpartition("/")[2])] = texts
            context.advance(sum(len(part) for part in parts.values()))
    return [text for start in sorted(parts) for text in parts[start]]
