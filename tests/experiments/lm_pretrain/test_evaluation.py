"""The measures of a language model, what it writes, and the baselines it is compared with."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.common.blocks import SPLITS, Split
from experiments.lm_pretrain import baselines, evaluation, shards
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.sampling import continuation
from experiments.lm_pretrain.settings import SampleSettings
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.tables import sections
from experiments.lm_pretrain.tokenizer import END_OF_TEXT, Chunk, encode_chunk, make_tokenizer
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import write_weights
from tests.experiments.lm_pretrain.test_data import store
from tests.experiments.references import lively
from tests.scenario import cases

MODEL = LmSettings(vocabulary=11, width=12, heads=3, layers=2, feed_forward=10, context=5)
GREEDY = SampleSettings(temperature=0, tokens=12)


def sure() -> LanguageModel:
    """A model whose weights are so large that it is sure of something."""
    torch.manual_seed(0)
    model = lively(LanguageModel(MODEL).eval())
    with torch.no_grad():
        model.head.weight[END_OF_TEXT] = 0  # seldom the most probable one
    return model


def cost_of(model: LanguageModel, before: list[int], token: int) -> float:
    """What a token costs after those before it."""
    logits = model(torch.tensor([before]))[0, -1].double()
    return -logits.log_softmax(0)[token].item()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Tokens in several shards, and a model."""
    monkeypatch.setattr(shards, "SHARD", 8)
    run = RunDirectory.at(tmp_path)
    generator = np.random.default_rng(0)
    sizes = {"train": 50, "held_out": 29}
    store(run_folder(run), {s: generator.integers(0, 9, sizes[s]) for s in SPLITS}, vocabulary=11)
    write_weights(run, run.model("train"), sure().state_dict(), {})
    return run


def stream(run: RunDirectory, split: Split) -> list[int]:
    return np.concatenate(run_folder(run).maps(split)).tolist()


@pytest.mark.parametrize("context", [1, 4, 5])
def test_each_held_out_token_costs_what_the_model_says(run, context):
    """Each token by its sample, and by a sliding window with at least half of the context."""
    settings = MODEL.model_copy(update={"context": context})
    model, tokens = sure(), stream(run, "held_out")
    samples, half = 28 // context, context // 2  # those of whole samples count
    inside, expected = [], []
    for place in range(1, samples * context + 1):  # of the token to predict
        sample, before = divmod(place - 1, context)
        start = sample * context
        inside.append(cost_of(model, tokens[start:place], tokens[place]))
        if before < half and sample:
            start -= context - half
        assert place - start > half or not sample
        expected.append(cost_of(model, tokens[start:place], tokens[place]))
    whole = settings, "fp32", "held_out"
    own, sliding = evaluation.token_costs(run, *whole, range(samples))
    assert own.ravel() == pytest.approx(inside, rel=1e-5)
    assert sliding.ravel() == pytest.approx(expected, rel=1e-5)
    assert np.allclose(sliding, own) == (context == 1)
    parts = [evaluation.token_costs(run, *whole, each) for each in (range(2), range(2, samples))]
    assert np.concatenate([part for part, _ in parts]) == pytest.approx(own, rel=1e-6)
    coarse, _ = evaluation.token_costs(run, settings, "bf16", "held_out", range(samples))
    assert coarse.sum() != own.sum()
    assert coarse.sum() == pytest.approx(own.sum(), rel=0.02)


@pytest.mark.parametrize("split", SPLITS)
def test_a_mixture_adds_the_probabilities_of_the_same_token(run, split, monkeypatch):
    """N-grams of the held-out text are of the training text, those of its start of the rest."""
    monkeypatch.setattr(evaluation, "_GROUP", 10)
    baselines.store_token_ngrams(run, 0.52)  # the first 26 of 50 training tokens
    train, held_out = stream(run, "train"), stream(run, "held_out")
    seen, text = (train[26:], train[:26]) if split == "train" else (train, held_out)
    part = range(5) if split == "held_out" else range(1, 5)
    ngrams = baselines.kneser_ney(np.array(seen, np.uint16), np.array(text, np.uint16), 11)
    _, sliding = evaluation.token_costs(run, MODEL, "fp32", split, part)
    costs = {weight: [] for weight in (0.0, 0.3, 1.0)}
    for place, cost in enumerate(sliding.ravel(), part.start * 5 + 1):
        for weight, found in costs.items():
            both = weight * math.exp(-cost) + (1 - weight) * ngrams[place]
            found.append(-math.log(both))
    losses = evaluation.block_losses(run, MODEL, "fp32", split, part, tuple(costs))
    assert losses.tokens.tolist() == [10, 10, 5][: len(losses.tokens)]
    for place, found in enumerate(costs.values()):
        groups = [sum(found[first : first + 10]) for first in range(0, len(found), 10)]
        assert losses.mixtures[:, place] == pytest.approx(groups, rel=1e-5)
    assert losses.mixtures[:, 0] == pytest.approx(losses.ngrams)
    assert losses.mixtures[:, 2] == pytest.approx(losses.sliding)


def test_the_baseline_knows_how_frequent_each_token_is(run):
    counts = Counter(stream(run, "train"))
    held_out = stream(run, "held_out")[1:26]
    expected = -sum(math.log((counts[token] + 1) / (50 + 11)) for token in held_out) / 25
    assert evaluation.unigram_loss(run_folder(run), 25, 11) == pytest.approx(expected, rel=1e-12)


def test_greedy_sampling_takes_the_most_probable_token():
    model, lengths = sure(), []
    for first in range(1, 11):
        expected = [first, 7]
        while len(expected) < 14 and expected[-1] != END_OF_TEXT:
            logits = model(torch.tensor([expected[-5:]]))[0, -1]
            expected.append(max(range(11), key=lambda token: logits[token].item()))
        found = continuation(model, [first, 7], GREEDY, 11)
        assert found == [token for token in expected[2:] if token != END_OF_TEXT]
        lengths.append(len(found))
    assert max(lengths) == 12  # beyond the context


def test_draws_follow_the_temperature_and_the_most_probable_tokens():
    model, prompt = sure(), [4, 8]
    shares = (model(torch.tensor([prompt]))[0, -1].double() / 2).softmax(0)
    best = shares.topk(3).indices.tolist()

    def firsts(top_k: int | None, draws: int = 60) -> list[int]:
        given = {"temperature": 2, "tokens": 1, "top_k": top_k}
        how = [SampleSettings(**given, seed=seed) for seed in range(draws)]
        return [(continuation(model, prompt, each, 11) or [END_OF_TEXT])[0] for each in how]

    drawn = np.bincount(firsts(None, 200), minlength=11) / 200
    np.testing.assert_allclose(drawn, shares.detach(), atol=0.1)
    kept = firsts(3)
    assert set(kept) == set(best)
    assert firsts(1) == [best[0]] * 60
    assert firsts(3) == kept
    assert firsts(50) == firsts(None)


def test_the_end_of_the_text_ends_it_and_tokens_of_no_text_are_not_taken():
    model = sure()
    with torch.no_grad():
        model.head.weight[10] = 50 * model.head.weight[3]  # of no text, and sure where it is not
        free = continuation(model, [3, 7], GREEDY, 10)
        assert 10 not in free
        assert 10 in continuation(model, [3, 7], GREEDY, 11)
        model.head.weight.zero_()  # all alike: the first one is the end
    assert continuation(model, [3, 7], GREEDY, 11) == []


def losses(groups: int, seed: int = 0) -> evaluation.Losses:
    """Groups of 100 tokens in which the sliding window is better than the n-grams by 0.1."""
    generator = np.random.default_rng(seed)
    tokens = np.full(groups, 100.0)
    ngrams = tokens * generator.uniform(2, 4, groups)
    sliding = ngrams - tokens * (0.1 + 0.3 * generator.standard_normal(groups))
    return evaluation.Losses(tokens, ngrams + tokens, sliding, ngrams, (sliding - tokens)[:, None])


def test_the_interval_has_the_true_gain_as_often_as_it_says():
    each = (evaluation.gain_rows(losses(20, seed), 1.0) for seed in range(400))
    rows = [found["sliding window"] for found in each]
    inside = np.mean([row["gain_low"] <= 0.1 <= row["gain_high"] for row in rows])
    assert 0.92 < inside < 0.98


def test_one_group_has_no_interval_and_no_weight_has_no_mixture():
    found = losses(1)
    rows = evaluation.gain_rows(found._replace(mixtures=np.empty((1, 0))), 1.0)
    assert [*rows] == ["language model", "sliding window"]
    assert math.isnan(rows["sliding window"]["gain_low"])


def by_dictionaries(train: bytes, order: int, history: bytes, symbol: int) -> float:
    """Interpolated Kneser-Ney with three discounts, written from the formulas, n-gram by n-gram."""
    text = tuple(train)

    def counts(size: int) -> Counter[tuple[int, ...]]:
        grams = Counter(text[i : i + size] for i in range(len(text) - size + 1))
        if size == order:
            return grams
        longer = {text[i : i + size + 1] for i in range(len(text) - size)}
        return Counter(gram[1:] for gram in longer)

    probability = 1 / 256
    for size in range(1, order + 1):
        known = counts(size)
        n = {k: max(1, sum(c == k for c in known.values())) for k in (1, 2, 3, 4)}
        share = n[1] / (n[1] + 2 * n[2])
        discount = {
            k: min(max(k - (k + 1) * share * n[k + 1] / n[k], 0.05), k - 0.05) for k in (1, 2, 3)
        }
        context = tuple(history[len(history) - size + 1 :]) if size > 1 else ()
        following = {g: c for g, c in known.items() if g[:-1] == context}
        if not following:
            continue
        total = sum(following.values())
        cuts = {g: discount[min(c, 3)] for g, c in following.items()}
        gram = (*context, symbol)
        own = (following[gram] - cuts[gram]) / total if gram in following else 0.0
        probability = own + sum(cuts.values()) / total * probability
    return probability


def kneser_ney_bits(train: bytes, test: bytes, order: int | None = None) -> float:
    seen, text = (np.frombuffer(part, np.uint8) for part in (train, test))
    return float(-np.log2(baselines.kneser_ney(seen, text, 256, order)).mean())


@settings(deadline=None, max_examples=25)
@given(
    train=st.text("ab é", min_size=1, max_size=60),
    test=st.text("abc ", min_size=1, max_size=12),
    order=st.integers(1, 5),
)
def test_the_n_gram_model_is_the_one_of_the_formulas(train, test, order):
    seen, text = train.encode(), test.encode()
    order = min(order, len(seen))
    costs = [
        -math.log2(by_dictionaries(seen, order, (seen + text[:place])[-8:], byte))
        for place, byte in enumerate(text)
    ]
    assert kneser_ney_bits(seen, text, order) == pytest.approx(np.mean(costs), rel=1e-9)


@pytest.mark.parametrize(
    ("vocabulary", "order"), [(2, 7), (256, 7), (512, 7), (1024, 6), (50_000, 4), (2**17, 3)]
)
def test_the_order_is_seven_or_what_an_integer_holds(vocabulary, order):
    assert baselines.order_of(vocabulary) == order


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_the_baselines_read_the_text_with_its_ends(tmp_path, monkeypatch, kind):
    """In shards and parts of a few tokens; of long texts the end, or the start."""
    monkeypatch.setattr(shards, "SHARD", 16)
    monkeypatch.setattr(baselines, "_AT_ONCE", 7)
    documents = {"train": ["a cat and a hat", "the end", "more cats"]}
    documents["held_out"] = ["a cat", "hats"]
    tokenizer = make_tokenizer(kind, documents["train"], 300)
    run = RunDirectory.at(tmp_path)
    chunks = {split: Chunk(tuple(texts), True) for split, texts in documents.items()}
    streams = {split: encode_chunk(tokenizer, chunk) for split, chunk in chunks.items()}
    content = tokenizer.content.encode()
    store(run_folder(run), streams, kind, tokenizer.vocabulary, tokenizer=content)
    seen, test = ("\xff".join(documents[split]).encode("latin-1") for split in SPLITS)
    share = len(test) / (len(test) - 1)
    bits = [kneser_ney_bits(seen, test), baselines.compressed_bits(seen, test)]
    expected = {"kneser-ney": bits[0] * share, "xz": bits[1] * share}
    assert baselines.baseline_bits(run) == pytest.approx(expected)
    monkeypatch.setattr(baselines, "_TRAINED_ON", 12)
    monkeypatch.setattr(baselines, "_TESTED_ON", 3)
    bits = kneser_ney_bits(seen[-12:], test[:3])
    assert baselines.baseline_bits(run)["kneser-ney"] == pytest.approx(bits)


def test_the_interval_of_the_gain_of_a_language_model_says_what_is_chance():
    given = cases(__file__, "gains")
    (section,) = sections({"gains": pd.DataFrame(given["gains"])})
    assert section.certainty == [given["says"]]
    assert sections({}) == []
