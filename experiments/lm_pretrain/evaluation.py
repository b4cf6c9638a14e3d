"""Evaluation on held-out text: the trained model in two ways, and a unigram baseline."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from experiments.common.blocks import Split, map_blocks
from experiments.common.evaluation import (
    load_trained,
    measure_rows,
    task_arithmetic,
    task_device,
)
from experiments.lm_pretrain.dataset import PackedTokens, model_of
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.shards import TokenFolder, run_folder
from raypipe.hardware import Precision
from raypipe.pipeline.context import StageContext
from raypipe.storage.run_directory import RunDirectory

#: tokens per forward pass; the logits of 50,000 different tokens then take 1.6 GB
_AT_ONCE = 8192
#: tokens that are worth a task
_BLOCK = 2**18


class Losses(NamedTuple):
    """Summed cross-entropies of held-out tokens in nats.

    Attributes:
        samples: each token after those of its sample, of which the first one has none before it.
        sliding: each token after ``context // 2`` or more tokens, except at the start of the text.

    """

    samples: float
    sliding: float


def run_evaluate(context: StageContext) -> None:
    """Record the measures of the language model and of the unigram model on the same tokens."""
    folder = run_folder(context.run_dir)
    index, model = folder.index(), model_of(folder, context.settings.model)
    samples = len(PackedTokens(folder, "held_out", model.context))
    predicted = samples * model.context
    rows: dict[Split, int] = {"held_out": samples}
    arguments = (context.run_dir, model, context.settings.train.training.precision)
    parts = map_blocks(
        context,
        rows,
        max(1, _BLOCK // model.context),
        lambda block: (held_out_loss, *arguments, range(block.start, block.end)),
        on_gpus=context.stage.on_gpu,
    )
    found = [each for _, each in parts]
    bits_per_nat = index.tokens["held_out"] / index.bytes["held_out"] / math.log(2)
    losses = {
        "language model": sum(each.samples for each in found) / predicted,
        "sliding window": sum(each.sliding for each in found) / predicted,
        "unigram": unigram_loss(folder, predicted, model.vocabulary),
    }
    measures = {
        method: {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss * bits_per_nat,
        }
        for method, loss in losses.items()
    }
    context.ledger.put("measures", measure_rows(context, {"tokens": predicted}, measures))


def load_model(run_dir: RunDirectory, settings: LmSettings) -> LanguageModel:
    """Return a run's trained model for evaluation, on a GPU if the task has one."""
    return load_trained(LanguageModel(settings), run_dir).to(task_device())


def held_out_loss(
    run_dir: RunDirectory, settings: LmSettings, arithmetic: Precision, part: range
) -> Losses:
    """Return the losses of held-out samples; logarithms are in fp32.

    The sliding window advances by half of the context: the first half of a sample is predicted in a
    window that began in the sample before.
    """
    model, context = load_model(run_dir, settings), settings.context
    samples = PackedTokens(run_folder(run_dir), "held_out", context)
    ahead = context - context // 2  # tokens by which such a window begins before the sample
    starts = [number * context for number in part]
    shifted = [start - ahead for start in starts if start > 0]
    with torch.inference_mode(), task_arithmetic(arithmetic):
        own = _costs(model, samples, starts)
        later = _costs(model, samples, shifted)
    half = context // 2
    first = own[: len(own) - len(later), :half]  # of the text's first sample
    sliding = own[:, half:].sum() + later[:, ahead:].sum() + first.sum()
    return Losses(own.sum().item(), sliding.item())


def _costs(model: LanguageModel, samples: PackedTokens, starts: list[int]) -> Tensor:
    """Return the cross-entropy of each next token in windows that start there, fp64 ``[W, L]``."""
    device = model.embedding.weight.device
    costs = [torch.empty(0, samples.context, dtype=torch.float64)]
    at_once = max(1, _AT_ONCE // samples.context)
    for place in range(0, len(starts), at_once):
        windows = [samples.window(start) for start in starts[place : place + at_once]]
        tokens = torch.stack(windows).to(device)
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        found = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        costs.append(found.view_as(targets).double().cpu())
    return torch.cat(costs)


def unigram_loss(folder: TokenFolder, predicted: int, vocabulary: int) -> float:
    """Return the cross-entropy of held-out tokens 1 to ``predicted`` in nats per token.

    Their probabilities are the frequencies in the training tokens, with add-one smoothing.
    """
    counts = _counts(folder, "train", 0, vocabulary) + 1
    held_out = _counts(folder, "held_out", 1, vocabulary, predicted + 1)
    costs = np.log(counts.sum()) - np.log(counts)
    return float(held_out @ costs / held_out.sum())


def _counts(
    folder: TokenFolder, split: Split, start: int, vocabulary: int, end: int | None = None
) -> NDArray[np.int64]:
    """Count each token among the tokens ``[start, end)`` of a split."""
    counts = np.zeros(vocabulary, np.int64)
    passed = 0
    for shard in folder.maps(split):
        part = shard[max(0, start - passed) : None if end is None else max(0, end - passed)]
        counts += np.bincount(part, minlength=vocabulary)
        passed += len(shard)
    return counts
