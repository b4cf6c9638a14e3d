"""Small data of every workload, and the tiny model that two of them can begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from scipy import sparse

from experiments.common.corpora.docstrings import docstring_records
from tests.experiments.rows import frame, write_rows
from tests.scenario import cases, write_files

#: what reads the folder ``topics``
TOPICS = ("data.source=files", "data.keywords=keywords.txt", "data.max_documents=null")
SUMMARIZED = ("socket", "header", "node", "queue", "turtle", "thread", "path", "digest")
#: documents of the two clear topics below a
TOPIC_WORDS = {
    "b": ["fruit", "apple", "pear", "cherry", "sweet", "juice"],
    "c": ["cars", "engine", "wheel", "brake", "road"],
}
#: what a language model trains on
TEXT = "".join(f"line {number % 7} of the text\n" for number in range(400))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_workloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this process, which has the sources that only one process read."""
    shared = tmp_path_factory.getbasetemp().with_name("corpora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYPIPE_CACHE", str(shared))
        shared.mkdir(exist_ok=True)
        with FileLock(shared / "lock"):
            docstring_records()
        patch.setenv("RAYPIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test."""
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the data, which is the current directory."""
    monkeypatch.chdir(files)
    return files


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a BERT of random weights with its tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=600,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    transformers.BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + i) for i in range(26))]
    transformers.BertTokenizerFast(
        vocab={word: i for i, word in enumerate(words)}, model_max_length=40
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str) -> Path:
    """A folder with data of each workload: rows, pairs, topics, texts, bags of words, a BERT."""
    folder = tmp_path_factory.mktemp("files")
    draw = np.random.default_rng(0)
    write_rows(folder / "rows.parquet", frame(400))
    pairs = []
    for number in range(240):
        word = str(draw.choice(SUMMARIZED))
        text = f"Some words come first, {number}. Then a {word} is told of. The end."
        pairs.append({"document": text, "summary": [f"Return the {word}.", f"Get a {word}."]})
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "text.txt").write_text(TEXT)
    write_files(folder, cases(__file__, "texts"))
    for name, size in (("train", 60), ("test", 30)):
        rows = []
        for number in range(size):
            label = "bc"[number % 2]
            text = " ".join(draw.choice(TOPIC_WORDS[label], 8))
            rows.append({"id": f"{name}{number}", "labels": [label], "text": text})
        write_rows(folder / f"topics/{name}.jsonl.gz", rows)
    (folder / "bow").mkdir()
    for split, documents in (("train", 60), ("val", 30)):
        for name in ("mine", "other"):
            counts = sparse.csr_matrix(draw.integers(0, 3, (documents, 1200)))
            sparse.save_npz(folder / f"bow/X_{name}_{split}_bow.npz", counts)
        sparse.save_npz(folder / f"bow/X_narrow_{split}_bow.npz", counts[:, : 500 + documents])
    (folder / "bert").symlink_to(tiny_bert)
    return folder
