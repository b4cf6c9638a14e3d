from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.common.blocks import SPLITS, Split
from experiments.lm_pretrain import evaluation, shards
from experiments.lm_pretrain.baselines import (
    kneser_ney,
    store_token_ngrams,
)
from experiments.lm_pretrain.evaluation import block_losses, token_costs, unigram_loss
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.sampling import continuation
from experiments.lm_pretrain.settings import SampleSettings
from experiments.lm_pretrain.shards import Index, ShardWriter, run_folder
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import write_weights

MODEL = LmSettings(vocabulary=11, width=12, heads=3, layers=2, feed_forward=10, context=5)
GREEDY = SampleSettings(temperature=0, tokens=12)


def lively(positions: str = "rotary") -> LanguageModel:
    """A model that is sure of something: its weights are large."""
    torch.manual_seed(0)
    settings = LmSettings.model_validate({**MODEL.model_dump(), "positions": positions})
    model = LanguageModel(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
        model.head.weight[END_OF_TEXT] = 0  # seldom the most probable one
    return model


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Tokens in several shards, and a model."""
    monkeypatch.setattr(shards, "SHARD", 8)
    run = RunDirectory.at(tmp_path)
    generator = np.random.default_rng(0)
    sizes = {"train": 50, "held_out": 29}
    for split in SPLITS:
        writer = ShardWriter(run_folder(run), split, "<u2")
        writer.add(generator.integers(0, 9, sizes[split]).astype(np.uint32))
        writer.close()
    run_folder(run).write_index(Index("bytes", 11, "<u2", 8, sizes, sizes, {}))
    write_weights(run, run.model("train"), lively().state_dict(), {})
    return run


def stream(run: RunDirectory, split: Split) -> list[int]:
    return np.concatenate(run_folder(run).maps(split)).tolist()


def test_the_loss_is_that_of_each_held_out_token(run: RunDirectory) -> None:
    model, tokens = lively(), stream(run, "held_out")
    costs = []
    for start in range(0, 25, 5):  # 28 tokens are predicted, those of 5 whole samples count
        for place in range(1, 6):
            logits = model(torch.tensor([tokens[start : start + place]]))[0, -1].double()
            costs.append(-logits.log_softmax(0)[tokens[start + place]].item())
    whole, _ = token_costs(run, MODEL, "fp32", "held_out", range(5))
    assert whole.ravel() == pytest.approx(costs, rel=1e-5)
    parts = [token_costs(run, MODEL, "fp32", "held_out", part) for part in (range(2), range(2, 5))]
    assert np.concatenate([own for own, _ in parts]) == pytest.approx(whole, rel=1e-6)
    half, _ = token_costs(run, MODEL, "bf16", "held_out", range(5))
    assert half.sum() != whole.sum()
    assert half.sum() == pytest.approx(whole.sum(), rel=0.02)


@pytest.mark.parametrize("context", [1, 4, 5])
def test_a_sliding_window_has_half_of_the_context_before_each_token(
    run: RunDirectory, context: int
) -> None:
    settings = MODEL.model_copy(update={"context": context})
    model, tokens = lively(), stream(run, "held_out")
    samples, half = 28 // context, context // 2
    expected = []
    for place in range(1, samples * context + 1):  # of the token to predict
        sample, inside = divmod(place - 1, context)
        start = sample * context
        if inside < half and sample:
            start -= context - half
        logits = model(torch.tensor([tokens[start:place]]))[0, -1].double()
        assert place - start > half or not sample
        expected.append(-logits.log_softmax(0)[tokens[place]].item())
    own, sliding = token_costs(run, settings, "fp32", "held_out", range(samples))
    assert sliding.ravel() == pytest.approx(expected, rel=1e-5)
    assert np.allclose(sliding, own) == (context == 1)


@pytest.mark.parametrize("split", SPLITS)
def test_a_mixture_adds_the_probabilities_of_the_same_token(
    run: RunDirectory, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N-grams of the held-out text are of the training text, those of its start of the rest."""
    monkeypatch.setattr(evaluation, "_GROUP", 10)
    store_token_ngrams(run, 0.52)  # the first 26 of 50 training tokens
    train, held_out = stream(run, "train"), stream(run, "held_out")
    seen, text = (train[26:], train[:26]) if split == "train" else (train, held_out)
    part = range(5) if split == "held_out" else range(1, 5)
    ngrams = kneser_ney(np.array(seen, np.uint16), np.array(text, np.uint16), 11)
    _, sliding = token_costs(run, MODEL, "fp32", split, part)
    costs = {weight: [] for weight in (0.0, 0.3, 1.0)}
    for place, cost in enumerate(sliding.ravel(), part.start * 5 + 1):
        for weight, found in costs.items():
            both = weight * math.exp(-cost) + (1 - weight) * ngrams[place]
            found.append(-math.log(both))
    losses = block_losses(run, MODEL, "fp32", split, part, tuple(costs))
    assert losses.tokens.tolist() == [10, 10, 5][: len(losses.tokens)]
    for place, found in enumerate(costs.values()):
        groups = [sum(found[first : first + 10]) for first in range(0, len(found), 10)]
        assert losses.mixtures[:, place] == pytest.approx(groups, rel=1e-5)
    assert losses.mixtures[:, 0] == pytest.approx(losses.ngrams)
    assert losses.mixtures[:, 2] == pytest.approx(losses.sliding)


def test_the_baseline_knows_how_frequent_each_token_is(run: RunDirectory) -> None:
    counts = Counter(stream(run, "train"))
    held_out = stream(run, "held_out")[1:26]
    expected = -sum(math.log((counts[token] + 1) / (50 + 11)) for token in held_out) / 25
    assert unigram_loss(run_folder(run), 25, 11) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_greedy_sampling_takes_the_most_probable_token(positions: str) -> None:
    model, lengths = lively(positions), []
    for first in range(1, 11):
        expected = [first, 7]
        while len(expected) < 14 and expected[-1] != END_OF_TEXT:
            logits = model(torch.tensor([expected[-5:]]))[0, -1]
            expected.append(max(range(11), key=lambda token: logits[token].item()))
        found = continuation(model, [first, 7], GREEDY, 11)
        assert found == [token for token in expected[2:] if token != END_OF_TEXT]
        lengths.append(len(found))
    assert max(lengths) == 12  # beyond the context


def test_draws_follow_the_temperature_and_the_most_probable_tokens() -> None:
    model, prompt = lively(), [4, 8]
    shares = (model(torch.tensor([prompt]))[0, -1].double() / 2).softmax(0)
    best = shares.topk(3).indices.tolist()

    def firsts(top_k: int | None) -> list[int]:
        return [
            (continuation(
                model, prompt, SampleSettings(temperature=2, tokens=1, top_k=top_k, seed=seed), 11
            ) or [END_OF_TEXT])[0]
            for seed in range(400)
        ]  # fmt: skip

    drawn = np.bincount(firsts(None), minlength=11) / 400
    np.testing.assert_allclose(drawn, shares.detach(), atol=0.1)
    kept = firsts(3)
    assert set(kept) == set(best)
    assert firsts(1) == [best[0]] * 400
    assert firsts(3) == kept
    assert firsts(50) == firsts(None)


def test_the_end_of_the_text_ends_it_and_tokens_of_no_text_are_not_taken() -> None:
    model = lively()
    with torch.no_grad():
        model.head.weight[10] = 50 * model.head.weight[3]  # of no text, and sure where it is not
        free = continuation(model, [3, 7], GREEDY, 10)
        assert 10 not in free
        assert 10 in continuation(model, [3, 7], GREEDY, 11)
        model.head.weight.zero_()  # all alike: the first one is the end
    assert continuation(model, [3, 7], GREEDY, 11) == []
