"""Texts, tokenizers, and the shards of tokens that a run stores."""

from __future__ import annotations

import json
import pickle
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.common.corpora.corpus import CorpusError
from experiments.lm_pretrain import shards
from experiments.lm_pretrain.data import divide, read_texts, text_content
from experiments.lm_pretrain.settings import LmDataSettings
from experiments.lm_pretrain.shards import TOKENIZER, DamagedError, Index, ShardWriter, TokenFolder
from experiments.lm_pretrain.tokenizer import (
    END_OF_TEXT,
    Kind,
    TextTokenizer,
    chunks,
    encode_chunk,
    make_tokenizer,
)
from experiments.lm_pretrain.training import PackedTokens
from raypipe.store.run_directory import RunDirectory
from tests.experiments.rows import write_text

KINDS: tuple[Kind, ...] = ("bpe", "characters", "bytes")
TEXT = "The cat sat.\nIt's the cat's mat, isn't it?\n\n  A dog; 12 cats.\t\n" * 3
ALPHABET = [*sorted(set(TEXT)), "é", "\u2003", "\r", "\x1c", "\U0001f431", "<|endoftext|>"]
TRAINING = [TEXT, "".join(ALPHABET)]
TOKENIZERS = {kind: make_tokenizer(kind, TRAINING, 300) for kind in KINDS}

texts = st.lists(st.sampled_from([*ALPHABET, "\n", "\n", "cat", "'s"]), max_size=60).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_a_text_survives_its_tokens(kind, text):
    tokenizer = pickle.loads(pickle.dumps(TOKENIZERS[kind]))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert END_OF_TEXT not in ids
    assert ids.max(initial=0) < tokenizer.vocabulary


@pytest.mark.parametrize("kind", KINDS)
@given(documents=st.lists(texts, min_size=1, max_size=4), size=st.integers(1, 40))
def test_the_tokens_are_the_same_for_any_chunking(kind, documents, size):
    tokenizer = TOKENIZERS[kind]
    whole = [tokenizer.encode(text) for text in documents]
    expected = [token for ids in whole for token in (END_OF_TEXT, *ids.tolist())][1:]
    parts = list(chunks(documents, size))
    assert np.concatenate([encode_chunk(tokenizer, part) for part in parts]).tolist() == expected
    assert "".join(piece for part in parts for piece in part.pieces) == "".join(documents)


def test_the_vocabularies():
    assert TOKENIZERS["bytes"].vocabulary == 257
    assert TOKENIZERS["characters"].vocabulary == 1 + len(set("".join(TRAINING)))
    assert 257 < TOKENIZERS["bpe"].vocabulary <= 300
    assert len(TOKENIZERS["bpe"].encode(TEXT)) < 0.8 * len(TEXT)
    assert TOKENIZERS["bytes"].encode("é\n").tolist() == [0xC4, 0xAA, 11]
    assert TextTokenizer("characters", "abc").encode("cab").tolist() == [3, 1, 2]
    assert TextTokenizer("bytes").decode([0xC4, END_OF_TEXT, 98]) == "\ufffda"


def test_the_last_share_is_held_out():
    assert divide(["0123456789" * 10], 0.1, "here") == (["0123456789" * 9], ["0123456789"])
    documents = [str(number) * 10 for number in range(10)]
    assert divide(documents, 0.2, "here") == (documents[:8], documents[8:])
    # a document is on one side
    assert divide(["a" * 50, "b" * 45, "c" * 5], 0.1, "here").held_out == ["c" * 5]
    for few in ([], [""], ["a"], ["a" * 3, "b" * 10]):
        with pytest.raises(CorpusError, match=r"here: .* cannot be divided"):
            divide(few, 0.1, "here")


def of_files(folder: Path, contents: dict[str, str], held_out=0, **given) -> LmDataSettings:
    """Settings that read these files, the last ones as held-out ones."""
    files = [write_text(folder / name, content) for name, content in contents.items()]
    train = len(files) - held_out
    parts = {"files": files[:train], "held_out_files": files[train:]}
    return LmDataSettings(source="text", **parts, **given)


def test_the_forms_of_files_are_read(tmp_path):
    rows = [{"body": "one\ntwo"}, {"body": ""}, {"body": "three"}]
    lines = "\n\n".join(map(json.dumps, rows))
    contents = {"a.txt": "plain\ntext", "b.jsonl": lines, "c.txt.gz": "packed", "d.jsonl.gz": lines}
    assert read_texts(of_files(tmp_path, contents, held_out=2, column="body")) == (
        ["plain\ntext", "one\ntwo", "three"],
        ["packed", "one\ntwo", "three"],
    )


def test_the_identity_is_the_content_of_the_files(tmp_path):
    one, other = {"a.txt": "same"}, {"c.txt": "other"}
    first, second, third = (
        text_content(of_files(tmp_path, each)) for each in (one, {"b.txt": "same"}, other)
    )
    assert first == second != third
    assert text_content(of_files(tmp_path, one | {"b.txt": "same"}, held_out=1)) != first


def test_the_builtin_text_is_every_docstring_once():
    found = read_texts(LmDataSettings())
    documents = [*found.train, *found.held_out]
    assert len(documents) == len(set(documents)) > 4000
    assert 0.05 < len(found.held_out) / len(documents) < 0.15
    assert any("Return a list of" in text for text in found.held_out)


def store(folder, streams, kind="bytes", vocabulary=257, dtype="<u2", tokenizer=b"") -> None:
    """Write the tokens of both splits as a run has them."""
    folder.write(TOKENIZER, tokenizer)
    checksums = {TOKENIZER: sha256(tokenizer).hexdigest()}
    for split, tokens in streams.items():
        writer = ShardWriter(folder, split, dtype)
        for part in np.array_split(tokens.astype(np.uint32), 3):
            writer.add(part)
        writer.close()
        assert writer.tokens == len(tokens)
        checksums |= writer.sha256
    sizes = {split: len(tokens) for split, tokens in streams.items()}
    folder.write_index(Index(kind, vocabulary, dtype, shards.SHARD, sizes, sizes, checksums))


#: of both splits; the shards have 7 tokens
STREAMS = {"train": np.arange(100, 140), "held_out": np.arange(14)}


def stored(location: Path, dtype: str = "<u2") -> TokenFolder:
    run = RunDirectory.at(location)
    folder = TokenFolder(run, run.path("tokens"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD", 7)
        store(folder, STREAMS, dtype=dtype)
    return folder


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize(
    ("context", "first"), [(1, 0), (3, 1), (5, 9), (7, 0), (13, 35), (39, 0), (4, 36), (4, 40)]
)
def test_packed_samples_cover_the_stream_after_the_validation_part(tmp_path, dtype, context, first):
    packed = PackedTokens(stored(tmp_path, dtype), "train", context, first)
    samples = pickle.loads(pickle.dumps(packed))
    stream = STREAMS["train"].tolist()[first:]
    assert len(samples) == max(0, len(stream) - 1) // context
    for number in range(len(samples)):
        sample = samples[number]
        assert sample.dtype == torch.int64
        assert sample.tolist() == stream[number * context : (number + 1) * context + 1]
    for outside in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"of {len(samples)}"):
            samples[outside]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train-00002.bin", truncate),
        ("held_out-00000.bin", Path.unlink),
        ("tokens.json", Path.unlink),
        ("tokens.json", truncate),
        ("tokenizer.json", Path.unlink),
    ],
)
def test_damage_is_noticed(tmp_path, name, damage):
    folder = stored(tmp_path / "run")
    damage(Path(folder.folder) / name)
    other = RunDirectory.at(tmp_path / "other")
    for use in (folder.check, lambda: folder.copy_to(TokenFolder(other, other.path()))):
        with pytest.raises(DamagedError, match=rf"{name}: the tokens are missing or damaged"):
            use()
    # without an index the copied files are not a folder of tokens
    assert not other.exists(other.path("tokens.json"))
