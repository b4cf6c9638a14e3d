"""Evaluation on held-out text: the trained model, and a unigram baseline."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset

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
    loss = sum(total for _, total in parts) / predicted
    bits_per_nat = index.tokens["held_out"] / index.bytes["held_out"] / math.log(2)
    losses = {"language model": loss, "unigram": unigram_loss(folder, predicted, model.vocabulary)}
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
) -> float:
    """Return the summed cross-entropy of held-out samples in nats; logarithms are in fp32."""
    model = load_model(run_dir, settings)
    device = model.embedding.weight.device
    samples = Subset(PackedTokens(run_folder(run_dir), "held_out", settings.context), part)
    total = 0.0
    with torch.inference_mode(), task_arithmetic(arithmetic):
        for batch in DataLoader(samples, max(1, _AT_ONCE // settings.context)):
            tokens = batch.to(device)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            total += F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").item()
    return total


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
