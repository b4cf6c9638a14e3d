"""The n-gram model and the compressor that a language model is compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.common.blocks import SPLITS
from experiments.lm_pretrain import baselines, shards
from experiments.lm_pretrain.baselines import (
    baseline_bits,
    compressed_bits,
    kneser_ney,
    order_of,
)
from experiments.lm_pretrain.shards import TOKENIZER, Index, ShardWriter, run_folder
from experiments.lm_pretrain.tokenizer import Chunk, Kind, encode_chunk, make_tokenizer
from raypipe.store.run_directory import RunDirectory


def by_dictionaries(
    train: Sequence[int], order: int, history: Sequence[int], symbol: int, vocabulary: int
) -> float:
    """Interpolated Kneser-Ney with three discounts, written from the formulas, n-gram by n-gram."""
    text = tuple(train)

    def counts(size: int) -> Counter[tuple[int, ...]]:
        grams = Counter(text[i : i + size] for i in range(len(text) - size + 1))
        if size == order:
            return grams
        longer = {text[i : i + size + 1] for i in range(len(text) - size)}
        return Counter(gram[1:] for gram in longer)

    probability = 1 / vocabulary
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
    return float(-np.log2(kneser_ney(seen, text, 256, order)).mean())


@settings(deadline=None, max_examples=60)
@given(
    train=st.text("ab é", min_size=1, max_size=60),
    test=st.text("abc ", min_size=1, max_size=12),
    order=st.integers(1, 5),
)
def test_the_n_gram_model_is_the_one_of_the_formulas(train: str, test: str, order: int) -> None:
    seen, text = train.encode(), test.encode()
    order = min(order, len(seen))
    costs = [
        -math.log2(by_dictionaries(seen, order, (seen + text[:place])[-8:], byte, 256))
        for place, byte in enumerate(text)
    ]
    assert kneser_ney_bits(seen, text, order) == pytest.approx(np.mean(costs), rel=1e-9)


@pytest.mark.parametrize(
    ("vocabulary", "order"), [(2, 7), (256, 7), (512, 7), (1024, 6), (50_000, 4), (2**17, 3)]
)
def test_the_order_is_seven_or_what_an_integer_holds(vocabulary: int, order: int) -> None:
    assert order_of(vocabulary) == order


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_the_baselines_read_the_text_with_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """In shards and parts of a few tokens; of long texts the end, or the start."""
    monkeypatch.setattr(shards, "SHARD", 16)
    monkeypatch.setattr(baselines, "_AT_ONCE", 7)
    documents = {
        "train": ["a cat and a hat", "the end", "more cats"],
        "held_out": ["a cat", "hats"],
    }
    tokenizer = make_tokenizer(kind, documents["train"], 300)
    folder = run_folder(run := RunDirectory.at(tmp_path))
    tokens = {}
    for split in SPLITS:
        writer = ShardWriter(folder, split, "<u2")
        writer.add(encode_chunk(tokenizer, Chunk(tuple(documents[split]), True)))
        writer.close()
        tokens[split] = writer.tokens
    folder.write(TOKENIZER, tokenizer.content.encode())
    folder.write_index(Index(kind, tokenizer.vocabulary, "<u2", 16, tokens, tokens, {}))
    texts = {split: "\xff".join(documents[split]).encode("latin-1") for split in SPLITS}
    found = baseline_bits(run)
    share = len(texts["held_out"]) / (len(texts["held_out"]) - 1)
    bits = kneser_ney_bits(texts["train"], texts["held_out"])
    assert found["kneser-ney"] == pytest.approx(bits * share)
    assert found["xz"] == pytest.approx(compressed_bits(texts["train"], texts["held_out"]) * share)
    monkeypatch.setattr(baselines, "_TRAINED_ON", 12)
    monkeypatch.setattr(baselines, "_TESTED_ON", 3)
    bits = kneser_ney_bits(texts["train"][-12:], texts["held_out"][:3])
    assert baseline_bits(run)["kneser-ney"] == pytest.approx(bits)
