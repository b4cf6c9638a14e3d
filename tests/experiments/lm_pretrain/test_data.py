from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.common.corpora.corpus import CorpusError
from experiments.lm_pretrain.data import divide, read_texts, text_content
from experiments.lm_pretrain.settings import LmDataSettings
from experiments.lm_pretrain.tokenizer import (
    END_OF_TEXT,
    Kind,
    TextTokenizer,
    chunks,
    encode_chunk,
    make_tokenizer,
)
from raypipe.errors import ConfigError

KINDS: tuple[Kind, ...] = ("bpe", "characters", "bytes")
TEXT = "The cat sat.\nIt's the cat's mat, isn't it?\n\n  A dog; 12 cats.\t\n" * 3
ALPHABET = [*sorted(set(TEXT)), "é", "\u2003", "\r", "\x1c", "\U0001f431", "<|endoftext|>"]
TRAINING = [TEXT, "".join(ALPHABET)]
TOKENIZERS = {kind: make_tokenizer(kind, TRAINING, 300) for kind in KINDS}

texts = st.lists(st.sampled_from([*ALPHABET, "\n", "\n", "cat", "'s"]), max_size=60).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_a_text_survives_its_tokens(kind: Kind, text: str) -> None:
    tokenizer = pickle.loads(pickle.dumps(TOKENIZERS[kind]))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert END_OF_TEXT not in ids
    assert ids.max(initial=0) < tokenizer.vocabulary


@pytest.mark.parametrize("kind", KINDS)
@given(documents=st.lists(texts, min_size=1, max_size=4), size=st.integers(1, 40))
def test_the_tokens_are_the_same_for_any_chunking(
    kind: Kind, documents: list[str], size: int
) -> None:
    tokenizer = TOKENIZERS[kind]
    whole = [tokenizer.encode(text) for text in documents]
    expected = [token for ids in whole for token in (END_OF_TEXT, *ids.tolist())][1:]
    parts = list(chunks(documents, size))
    assert np.concatenate([encode_chunk(tokenizer, part) for part in parts]).tolist() == expected
    assert "".join(piece for part in parts for piece in part.pieces) == "".join(documents)


def test_the_vocabularies() -> None:
    assert TOKENIZERS["bytes"].vocabulary == 257
    assert TOKENIZERS["characters"].vocabulary == 1 + len(set("".join(TRAINING)))
    assert 257 < TOKENIZERS["bpe"].vocabulary <= 300
    assert len(TOKENIZERS["bpe"].encode(TEXT)) < 0.8 * len(TEXT)
    assert TOKENIZERS["bytes"].encode("é\n").tolist() == [0xC4, 0xAA, 11]
    assert TextTokenizer("characters", "abc").encode("cab").tolist() == [3, 1, 2]
    assert TextTokenizer("bytes").decode([0xC4, END_OF_TEXT, 98]) == "\ufffda"


@pytest.mark.parametrize("character", ["z", "\U0001f436"])
def test_an_unknown_character_is_refused(character: str) -> None:
    with pytest.raises(ConfigError, match=r"U\+.* is not among the 3 of the training text"):
        TextTokenizer("characters", "abc").encode(f"ab{character}")


def test_the_last_share_is_held_out() -> None:
    assert divide(["0123456789" * 10], 0.1, "here") == (["0123456789" * 9], ["0123456789"])
    documents = [str(number) * 10 for number in range(10)]
    assert divide(documents, 0.2, "here") == (documents[:8], documents[8:])
    # a document is on one side
    assert divide(["a" * 50, "b" * 45, "c" * 5], 0.1, "here").held_out == ["c" * 5]
    for few in ([], [""], ["a"], ["a" * 3, "b" * 10]):
        with pytest.raises(CorpusError, match=r"here: .* cannot be divided"):
            divide(few, 0.1, "here")


def test_the_forms_of_files_are_read(tmp_path: Path) -> None:
    rows = [{"body": "one\ntwo"}, {"body": ""}, {"body": "three"}]
    lines = "\n\n".join(map(json.dumps, rows))
    (tmp_path / "a.txt").write_text("plain\ntext", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("packed")
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(lines)
    names = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt.gz", "d.jsonl.gz")]
    settings = LmDataSettings(
        source="text", files=names[:2], held_out_files=names[2:], column="body"
    )
    assert read_texts(settings) == (
        ["plain\ntext", "one\ntwo", "three"],
        ["packed", "one\ntwo", "three"],
    )


def test_the_identity_is_the_content_of_the_files(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path, text in zip(paths, ("same", "same", "other"), strict=True):
        path.write_text(text, encoding="utf-8")
    first, second, third = (
        text_content(LmDataSettings(source="text", files=(path,))) for path in paths
    )
    assert first == second != third
    held_out = LmDataSettings(source="text", files=(paths[0],), held_out_files=(paths[1],))
    assert text_content(held_out) != first


def test_the_builtin_text_is_every_docstring_once() -> None:
    found = read_texts(LmDataSettings())
    documents = [*found.train, *found.held_out]
    assert len(documents) == len(set(documents)) > 4000
    assert 0.05 < len(found.held_out) / len(documents) < 0.15
    assert any("Return a list of" in text for text in found.held_out)


def test_an_empty_held_out_file_is_refused(tmp_path: Path) -> None:
    paths = tmp_path / "a.txt", tmp_path / "b.txt"
    for path, text in zip(paths, ("text", ""), strict=True):
        path.write_text(text, encoding="utf-8")
    settings = LmDataSettings(source="text", files=paths[:1], held_out_files=paths[1:])
    with pytest.raises(CorpusError, match=r"data.held_out_files: the files contain no text"):
        read_texts(settings)
