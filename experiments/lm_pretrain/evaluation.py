"""Evaluation on held-out text: the model in two ways, n-grams, and the mixture of both."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from experiments.common.blocks import Split, map_blocks
from experiments.common.evaluation import load_trained, measure_rows, task_arithmetic, task_device
from experiments.lm_pretrain.baselines import token_log_probabilities
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.shards import TokenFolder, run_folder
from experiments.lm_pretrain.tables import MIXTURE, MODEL, MODELS, NGRAMS, SLIDING
from experiments.lm_pretrain.training import PackedTokens, model_of, validation_tokens
from raypipe import RunDirectory, StageContext, precision, stats

#: weights of the model that the choice is among
WEIGHTS = tuple(number / 50 for number in range(51))

Costs = NDArray[np.float64]


class Losses(NamedTuple):
    """Summed cross-entropies in nats of groups of successive tokens.

    Attributes:
        tokens: number of tokens of each group, ``[G]``.
        samples: of the model, each token after those of its sample, ``[G]``.
        sliding: of the model, each token after half of the context or more, except at the start of
            the text, ``[G]``.
        ngrams: of the n-grams, ``[G]``; NaN where they are not stored.
        mixtures: of the mixture with each weight, ``[G, W]``.

    """

    tokens: Costs
    samples: Costs
    sliding: Costs
    ngrams: Costs
    mixtures: Costs

    def part(self, groups: NDArray[np.bool_]) -> Losses:
        """Return the losses of some groups."""
        return Losses(*(each[groups] for each in self))


def mixed(model: Costs, ngrams: Costs, weight: float) -> Costs:
    """Return the cost of each token under ``weight`` model + (1 - ``weight``) n-grams, in nats.

    Probabilities are interpolated (Mikolov et al. 2010, Recurrent neural network based language
    model, section 3), so those of all tokens sum to one again.

    Args:
        model: cost of each token under the model.
        ngrams: cost of the same tokens under the n-grams.
        weight: of the model, 0 to 1.

    """
    # a weight of 0 or 1 has no logarithm, and n-grams that are not stored have no cost
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log([weight, 1 - weight])
        costs: Costs = -np.logaddexp(logs[0] - model, logs[1] - ngrams)
    return costs


def gain_rows(losses: Losses, bits_per_nat: float) -> dict[str, dict[str, Any]]:
    """Return by how much the model and the mixture are better than the n-grams, with intervals.

    The gain is the difference of the losses in bits per byte. Groups of tokens count as independent
    observations: the interval is Student's 95 % interval of the ratio of sums over groups (Cochran
    1977, Sampling techniques, section 6.3). It says nothing about other seeds of the training.

    Args:
        losses: of groups in which all methods have a loss, with at most one mixture.
        bits_per_nat: bits per byte of one nat per token.

    """
    costs = {MODEL: losses.samples, SLIDING: losses.sliding}
    if losses.mixtures.shape[1]:
        costs[MIXTURE] = losses.mixtures[:, 0]
    total, groups = float(losses.tokens.sum()), len(losses.tokens)
    rows: dict[str, dict[str, Any]] = {}
    for method, cost in costs.items():
        better = (losses.ngrams - cost) * bits_per_nat
        gain = float(better.sum()) / total
        half = math.nan
        if groups > 1:
            residuals = (better - gain * losses.tokens) * groups / total
            half = float(stats.half_width(residuals.std(ddof=1), groups))
        rows[method] = {
            "method": method,
            "baseline": NGRAMS,
            "tokens": int(total),
            "groups": groups,
            "gain": gain,
            "gain_low": gain - half,
            "gain_high": gain + half,
        }
    return rows


#: tokens per forward pass; the logits of 50,000 different tokens then take 1.6 GB
_AT_ONCE = 8192
#: tokens that are worth a task
_BLOCK = 2**18


#: tokens that intervals count as one observation, in whole samples
_GROUP = 1024


def run_evaluate(context: StageContext) -> None:
    """Record the measures of the language model, of n-grams of the same tokens, and of both mixed.

    The weight of the mixture is the one with the lowest loss on the start of the training text,
    which neither the model nor the n-grams of that choice have seen.
    """
    folder = run_folder(context.run_dir)
    index, model = folder.index(), model_of(folder, context.settings.model)
    samples = len(PackedTokens(folder, "held_out", model.context))
    predicted = samples * model.context
    weight = _weight(context, model)
    found = _losses(context, model, "held_out", range(samples), () if weight is None else (weight,))
    nats = {
        MODEL: found.samples.sum() / predicted,
        SLIDING: found.sliding.sum() / predicted,
        "unigram": unigram_loss(folder, predicted, model.vocabulary),
    }
    rows = measure_rows(context, {"tokens": predicted}, index.measures(nats))
    known = found.part(np.isfinite(found.ngrams))
    if counted := int(known.tokens.sum()):
        nats = {NGRAMS: known.ngrams.sum() / counted}
        if weight is not None:
            nats[MIXTURE] = known.mixtures.sum() / counted
        rows |= measure_rows(context, {"tokens": counted}, index.measures(nats))
        context.ledger.put("gains", gain_rows(known, index.bits_per_nat))
    for method, row in rows.items():
        row["weight"] = weight if method == MIXTURE else float(method in MODELS)
    context.ledger.put("measures", rows)


def _weight(context: StageContext, model: LmSettings) -> float | None:
    """Return the weight of the model in the mixture; None without a sample to choose it on."""
    folder, share = run_folder(context.run_dir), context.settings.data.validation_share
    # before the first sample there is no text, which the n-grams would suffer from
    part = range(1, (validation_tokens(folder, share) - 1) // model.context)
    if not part:
        return None
    found = _losses(context, model, "train", part, WEIGHTS)
    weight = WEIGHTS[int(found.mixtures.sum(0).argmin())]
    tokens = len(part) * model.context
    context.say(f"weight of the language model: {weight}, chosen on {tokens} training tokens")
    return weight


def _losses(
    context: StageContext,
    model: LmSettings,
    split: Split,
    part: range,
    weights: tuple[float, ...],
) -> Losses:
    """Return the losses of samples of a split, from a task per block of them."""
    arguments = (context.run_dir, model, context.settings.train.training.precision, split)
    group = max(1, _GROUP // model.context)
    found = map_blocks(
        context,
        {split: len(part)},
        max(1, _BLOCK // (model.context * group)) * group,
        lambda block: (block_losses, *arguments, part[block.start : block.end], weights),
        on_gpus=context.stage.on_gpu,
    )
    return Losses(*map(np.concatenate, zip(*(each for _, each in found), strict=True)))


def load_model(run_dir: RunDirectory, settings: LmSettings) -> LanguageModel:
    """Return a run's trained model for evaluation, on a GPU if the task has one."""
    return load_trained(LanguageModel(settings), run_dir).to(task_device())


def block_losses(
    run_dir: RunDirectory,
    settings: LmSettings,
    arithmetic: precision.Precision,
    split: Split,
    part: range,
    weights: tuple[float, ...] = (),
) -> Losses:
    """Task: return the losses of samples of a split, and of mixtures with n-grams.

    Args:
        run_dir: with the model, the tokens and the stored probabilities of the n-grams.
        settings: of the model.
        arithmetic: of the forward passes; logarithms are in fp32.
        split: of the samples.
        part: numbers of the samples.
        weights: of the model in each mixture.

    """
    context = settings.context
    own, sliding = token_costs(run_dir, settings, arithmetic, split, part)
    first, last = part.start * context + 1, part.stop * context + 1
    ngrams = -token_log_probabilities(run_dir, split, first, last).reshape(own.shape)
    mixtures = [mixed(sliding, ngrams, weight) for weight in weights]
    starts = np.arange(0, len(part), max(1, _GROUP // context))

    def summed(costs: Costs) -> Costs:
        return np.add.reduceat(costs.sum(1), starts)

    return Losses(
        tokens=summed(np.ones_like(own)),
        samples=summed(own),
        sliding=summed(sliding),
        ngrams=summed(ngrams),
        mixtures=np.array([summed(each) for each in mixtures]).reshape(len(weights), len(starts)).T,
    )


def token_costs(
    run_dir: RunDirectory,
    settings: LmSettings,
    arithmetic: precision.Precision,
    split: Split,
    part: range,
) -> tuple[Costs, Costs]:
    """Return the cross-entropy of each token of samples in nats, ``[samples, context]``.

    The first result predicts it within its sample, the second with a sliding window, which
    advances by half of the context: the first half of a sample is predicted in a window that began
    in the sample before.
    """
    model, context = load_model(run_dir, settings), settings.context
    samples = PackedTokens(run_folder(run_dir), split, context)
    half = context // 2
    ahead = context - half  # tokens by which such a window begins before the sample
    starts = [number * context for number in part]
    shifted = [start - ahead for start in starts if start > 0]
    with torch.inference_mode(), task_arithmetic(arithmetic):
        own = _costs(model, samples, starts)
        later = _costs(model, samples, shifted)
    sliding = own.copy()
    sliding[len(own) - len(later) :, :half] = later[:, ahead:]  # the text's first sample has none
    return own, sliding


def _costs(model: LanguageModel, samples: PackedTokens, starts: list[int]) -> Costs:
    """Return the cross-entropy of each next token in windows that start there, ``[W, L]``."""
    device = model.embedding.weight.device
    costs: list[Costs] = [np.empty((0, samples.context))]
    at_once = max(1, _AT_ONCE // samples.context)
    for place in range(0, len(starts), at_once):
        windows = [samples.window(start) for start in starts[place : place + at_once]]
        tokens = torch.stack(windows).to(device)
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        found = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        costs.append(found.view_as(targets).double().cpu().numpy())
    return np.concatenate(costs)


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
