"""Every reader of files from outside: valid files of it, and what may come of a damaged one.

``check(content, folder)`` stores the bytes, reads them, and returns whether a result came of them.
It raises ConfigError where the reader does, with a message that names the file; an AssertionError
for a result that is not the whole content of the file, as a second, slow reading of it tells, or,
where the format has checksums, as it was written.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from scipy import sparse

from experiments.common.corpora.bow import load_bow
from experiments.common.corpora.corpus import Corpus, make_corpus
from experiments.common.corpora.text import Tokenization, load_table, load_text
from experiments.teleclass.corpus import read_annotations
from experiments.teleclass.documents import Documents, read_documents
from experiments.teleclass.taxonomy import Row, Taxonomy, make_taxonomy, read_taxonomy
from raypipe.commands import configuration as config
from raypipe.errors import ConfigError
from raypipe.store import artifacts
from raypipe.store import cache as caches
from raypipe.store import tables as results
from raypipe.store.ledger import Ledger, encode
from raypipe.store.run_directory import RunDirectory
from raypipe.training.checkpoint import Checkpoint, CheckpointStore
from raypipe.training.weights import read_weights, write_weights

sys.path.insert(0, str(Path(__file__).parents[1] / "raypipe" / "examples"))

COUNTS = sparse.csr_matrix(np.array([[3, 0, 1, 0], [0, 0, 0, 0], [0, 2, 0, 70]]))
LABELS = b"0\tfood\n1\tfruit\n2\tapple\n3\ttools\n"
EDGES = b"0\t1\n1\t2\n"
TERMS = b"fruit:sweet,juicy\napple:red\n"
TEXTS = ["an apple a day", "tools, and more tools", 'a "quoted" apple']
EVERY_WORD = Tokenization(min_df=1, max_df=1.0, stop_words=None)


def named(path: Path | str, read: Callable[[], Any]) -> Any:
    """What is read; its ConfigError names the file and is not as long as it."""
    try:
        return read()
    except ConfigError as error:
        text = str(error)
        assert str(path) in text, text
        assert len(text) < 10_010, len(text)
        raise


class Reader(NamedTuple):
    """A reader of files: valid files, and what stores one and reads it.

    ``check(content, folder)`` returns whether a result came of the bytes.
    """

    seeds: tuple[bytes, ...]
    check: Callable[[bytes, Path], bool]


def of_file(seeds, name, read, verify, beside=()) -> Reader:
    """A reader of one file of a folder.

    Args:
        seeds: valid files.
        name: of the file.
        read: reads the file at a path.
        verify: of what was read and the content: an AssertionError where they differ.
        beside: files next to it, with their contents.

    """

    def check(content: bytes, folder: Path) -> bool:
        for file, other in (*beside, (name, content)):
            (folder / file).write_bytes(other)
        verify(named(folder, lambda: read(folder / name)), content)
        return True

    return Reader(seeds, check)


# configuration


def _own(document: config.Document, _: object, where: str = "my.yaml", *overrides: str) -> None:
    found = named(where, lambda: config.resolve(document, overrides, "cpu", []))
    again = config.parse(yaml.safe_dump(found.resolved()), "config.yaml")
    assert config.resolve(again, (), "cpu", []).settings == found.settings


def _override(content: bytes, folder: Path) -> bool:
    document = config.parse("experiment: example_experiment", "my.yaml")
    # as the operating system hands over arguments
    text = content.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    _own(document, None, "command line", text)
    return True


# corpora and taxonomies, read in the plainest way


def _plain(content: bytes) -> str:
    return content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode("utf-8-sig")


def _filled(content: bytes) -> list[str]:
    return [line for line in _plain(content).split("\n") if line.strip()]


def _pairs(content: bytes) -> list[tuple[str, str]]:
    rows = [line.split("\t") for line in _filled(content)]
    assert all(len(row) == 2 for row in rows)
    return [(left.strip(), right.strip()) for left, right in rows]


def _bow(corpus: Corpus, content: bytes) -> None:
    assert corpus.fingerprint == make_corpus("x", COUNTS, source="").fingerprint


def _lines(corpus: Corpus, content: bytes) -> None:
    lines = _plain(content).split("\n")
    assert corpus.documents + corpus.dropped_documents == len(lines) - (not lines[-1])


def _column(corpus: Corpus, content: bytes, *, form: str) -> None:
    if form != "csv":
        is_table = form == "parquet"
        rows = pq.read_metadata(io.BytesIO(content)).num_rows if is_table else len(_filled(content))
        assert corpus.documents + corpus.dropped_documents == rows


def _labels(taxonomy: Taxonomy, content: bytes) -> None:
    assert list(zip(taxonomy.ids, taxonomy.names, strict=True)) == _pairs(content)


def _hierarchy(taxonomy: Taxonomy, content: bytes) -> None:
    found = [(taxonomy.ids[p], taxonomy.ids[c]) for p, c in taxonomy.edges]
    assert sorted(found) == sorted(set(_pairs(content)))
    assert taxonomy.depth.max() <= len(taxonomy)


def _keywords(taxonomy: Taxonomy, content: bytes) -> None:
    for line in _filled(content):
        name, _, terms = (part.strip() for part in line.rpartition(":"))
        if name in taxonomy.names:
            have = taxonomy.keywords[taxonomy.names.index(name)]
            assert {t.strip() for t in terms.split(",")} - {""} <= set(have)


@cache
def _taxonomy() -> Taxonomy:
    rows = [Row("here", *pair) for pair in _pairs(LABELS)]
    return make_taxonomy(rows, [Row("here", *pair) for pair in _pairs(EDGES)], source="here")


def _annotations(found: Mapping[str, Any], content: bytes) -> None:
    assert set(found) == set(json.loads(content))


def _documents(documents: Documents, content: bytes, *, form: str) -> None:
    total = len(documents) + documents.dropped.get("empty documents", 0)
    if form in ("jsonl", "txt"):
        assert total == len(_filled(content))
    documents.texts.validate(full=True)
    assert documents.fingerprint


def _gold(documents: Documents, content: bytes) -> None:
    gold = dict(_pairs(content))
    for row, name in enumerate(documents.ids.to_pylist()):
        wanted = {_taxonomy().ids.index(c) for c in gold.get(name, "").replace(",", " ").split()}
        assert wanted <= set(documents.gold[row].indices.tolist())


# what raypipe itself has written


def _run(folder: Path) -> RunDirectory:
    return RunDirectory.at(folder / "run")


@cache
def _checkpoint() -> tuple[object, Mapping[str, bytes]]:
    state = {"state": {0: {"step": 5, "mean": torch.arange(4.0)}}, "groups": [{"lr": 0.1}]}
    model = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
    checkpoint = Checkpoint(5, model, state, {"scale": 2.0})
    files = written(lambda folder: CheckpointStore(RunDirectory.at(folder), "t").save(checkpoint))
    return checkpoint, files


def written(write: Callable[[Path], object]) -> dict[str, bytes]:
    """The files that a function writes to a folder, by their names."""
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return {p.name: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def _lists(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def _checkpoint_file(content: bytes, folder: Path, *, name: str, forged: bool = False) -> bool:
    """``forged``: the manifest vouches for the file."""
    checkpoint, files = _checkpoint()
    run = _run(folder)
    files = {**files, name: content}
    if forged:
        digest = hashlib.sha256(files["state.pt"]).hexdigest()
        files["manifest.json"] = json.dumps({"step": 5, "sha256": digest}).encode()
    for file, kept in files.items():
        run.write(f"{run.checkpoints('t')}/step_00000005/{file}", kept)
    told: list[str] = []
    found = CheckpointStore(run, "t").newest(told.append)
    if found is None:
        assert "step_00000005 is incomplete or corrupt" in told[0], told
        return False
    assert found.step == 5
    if not forged:
        assert _lists(found.model) == _lists(checkpoint.model)
        assert torch.equal(found.optimizer["state"][0]["mean"], torch.arange(4.0))
        assert found.scaler == checkpoint.scaler
    return True


def _weights(content: bytes, folder: Path) -> bool:
    run = _run(folder)
    path = run.model("t")
    run.write(path, content)
    found, metadata = named(path, lambda: read_weights(run, path))
    assert metadata["model"] == "{}"
    assert _lists(found) == _lists(_checkpoint()[0].model)
    return True


ROWS = {"a": {"x": 1.5}, "b": {"x": [1, None, "ü"]}, "c": {"x": {"y": True}}}


def _ledger(content: bytes, folder: Path) -> bool:
    run = _run(folder)
    run.delete(run.ledger)
    run.write(f"{run.ledger}/00000000.jsonl", content)
    with patch.object(logging.getLogger("raypipe.store.ledger"), "handle") as told:
        ledger = Ledger(run, writable=False)
        found = list(ledger.items("evaluations"))
        if Ledger(run).tables() or found:
            assert list(Ledger(run).items("evaluations")) == found, "opening it changed it"
    assert _within(found)
    if len(found) < len(ROWS):  # what is cut off after whole lines was never there
        cut = content.endswith(b"\n") or not content
        is_told = told.called or ledger.damage
        assert is_told or (cut and LEDGER.startswith(content)), "rows are missing without a word"
        assert not (ledger.damage and ledger.rows("units"))
    return len(found) == len(ROWS)


def _within(found: list[tuple[str, object]]) -> bool:
    return all(ROWS.get(key) == row for key, row in found)


LEDGER = b"".join(
    encode(
        [
            *(("evaluations", [key], json.dumps([row]).encode()) for key, row in ROWS.items()),
            *(("units", [key], b"[{}]") for key in ROWS),
        ],
        0,
    )
)
TABLE = {"n": list(range(50)), "text": [f"row {i}" for i in range(50)], "x": [0.5] * 50}


def _table(content: bytes, folder: Path) -> bool:
    run = _run(folder)
    run.write(run.partition("evaluations"), content)
    frame = named(run.partition("evaluations"), lambda: results.read_table(run, "evaluations"))
    # values are under checksums of pages; names and types of columns are not
    assert all(len(values) == 50 for values in frame.to_dict("list").values())
    return True


@contextmanager
def _cache_at(folder: Path) -> Iterator[None]:
    """The user's cache lies there, and says nothing of what is wrong with it."""
    with patch.dict(os.environ, RAYPIPE_CACHE=str(folder)):
        logging.disable()
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _cache(content: bytes, folder: Path) -> bool:
    (folder / "x.sqlite").write_bytes(content)
    for name in ("x.sqlite-wal", "x.sqlite-journal", "x.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    with _cache_at(folder), caches.Cache("x") as kept:
        found = kept.get(ROWS)
        kept.put({"new": {"x": 1}})
    assert _within(list(found.items()))
    return len(found) == len(ROWS)


def _npz_matrix(matrix: object) -> bytes:
    stream = io.BytesIO()
    sparse.save_npz(stream, matrix)
    return stream.getvalue()


JSONL = b"".join(
    json.dumps({"id": i, "text": t, "labels": ["1"]}).encode() + b"\n" for i, t in enumerate(TEXTS)
)
CSV = pd.DataFrame({"id": range(3), "text": TEXTS, "labels": "1 2"}).to_csv(index=False).encode()
TXT = "".join(f"d{i}\t{text}\n" for i, text in enumerate(TEXTS)).encode()
PARQUET = artifacts.to_bytes(
    pa.table({"id": [0, 1, 2], "text": TEXTS, "labels": [["1"], [], None]})
)
MY_YAML = b"""experiment: example_experiment
study: &s {runs: 7, start: [1, 2], share: 1e-3, options: {a: {b: [1, x]}}}
fit: {training: {steps: 10, micro_batch: 4, seed: 1}, scaling: {workers: 2}}
profiles: {cpu: {study: {runs: 3}}, gpu: {min_gpu_memory_gb: 10}}
"""


def readers() -> dict[str, Reader]:
    """Every reader by name."""
    bows = (_npz_matrix(COUNTS), _npz_matrix(COUNTS.tocoo()))
    answers = b'{"a": "1", "b": {"labels": ["2", 3]}}'
    classes = (("labels.txt", LABELS), ("edges.txt", EDGES))
    texts = (("x.txt", b"a\tsome text\nb\tmore text\n"),)

    def weights(at: Path) -> None:
        run = RunDirectory.at(at)
        write_weights(run, run.model("t"), _checkpoint()[0].model, {"model": "{}"})

    def cache(at: Path) -> None:
        with _cache_at(at), caches.Cache("x") as kept:
            kept.put(ROWS)

    def taxonomy(path: Path) -> Taxonomy:
        """Of files that have these names, or of keywords besides."""
        terms = [path] * (path.name == "terms.txt")
        return read_taxonomy(path.with_name("labels.txt"), path.with_name("edges.txt"), *terms)

    def gold(path: Path) -> Documents:
        return read_documents(path.with_name("x.txt"), _taxonomy(), labels=path)

    def documents(path: Path) -> Documents:
        return read_documents(path, _taxonomy())

    def answered(path: Path) -> Mapping[str, Any]:
        return read_annotations(path, _taxonomy())

    def bow(path: Path) -> Corpus:
        return load_bow(path.parent, "x")

    def lines(path: Path) -> Corpus:
        return load_text(path.parent, "x", EVERY_WORD)

    def column(path: Path) -> Corpus:
        return load_table(path.parent, "x", path.suffix[1:], tokenization=EVERY_WORD)

    found: dict[str, Reader] = {
        "configuration": of_file((MY_YAML,), "my.yaml", config.read, _own),
        "override": Reader((b"study.options.a={b: [1, x]}", b"fit.training.steps=1e2"), _override),
        "bow": of_file(bows, "X_x_val_bow.npz", bow, _bow),
        "lines": of_file((TXT,), "x.txt", lines, _lines),
        "labels": of_file((LABELS,), "labels.txt", taxonomy, _labels, classes),
        "hierarchy": of_file((EDGES,), "edges.txt", taxonomy, _hierarchy, classes),
        "keywords": of_file((TERMS,), "terms.txt", taxonomy, _keywords, classes),
        "annotations": of_file((answers,), "answers.json", answered, _annotations),
        "gold": of_file((b"a\t1,2\nb\t0 3\n",), "gold.txt", gold, _gold, texts),
        "weights": Reader(tuple(written(weights).values()), _weights),
        "ledger": Reader((LEDGER,), _ledger),
        "table": Reader((artifacts.to_bytes(pa.table(TABLE)),), _table),
        "cache": Reader((written(cache)["x.sqlite"],), _cache),
    }
    for form, content in {"jsonl": JSONL, "csv": CSV, "parquet": PARQUET, "txt": TXT}.items():
        name, verify = f"x.{form}", partial(_documents, form=form)
        found[f"documents.{form}"] = of_file((content,), name, documents, verify)
        if form != "txt":
            verify = partial(_column, form=form)
            found[f"column.{form}"] = of_file((content,), name, column, verify)
    for name, content in _checkpoint()[1].items():
        found[f"checkpoint/{name}"] = Reader((content,), partial(_checkpoint_file, name=name))
        if name != "manifest.json":
            forged = partial(_checkpoint_file, name=name, forged=True)
            found[f"forged/{name}"] = Reader((content,), forged)
    return found
