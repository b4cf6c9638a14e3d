"""Every reader of files from outside: valid files of it, and what may come of a damaged one.

``check(content, folder)`` stores the bytes, reads them, and returns whether a result came of them.
It raises ConfigError where the reader does, with a message that names the file; an AssertionError
for a result that is not the whole content of the file, as a second, slow reading of it tells, or,
where the format has checksums, as it was written.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from scipy import sparse

from experiments.common.corpora import docstrings
from experiments.common.corpora.bow import load_bow, load_uci
from experiments.common.corpora.corpus import make_corpus
from experiments.common.corpora.files import table_of
from experiments.common.corpora.text import Tokenization, load_table, load_text
from experiments.teleclass.corpus import read_annotations
from experiments.teleclass.documents import read_documents
from experiments.teleclass.taxonomy import Row, make_taxonomy, read_taxonomy
from raypipe.commands import configuration as config
from raypipe.errors import ConfigError
from raypipe.store import artifacts, lock
from raypipe.store import cache as caches
from raypipe.store import tables as results
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "raypipe" / "examples"))
PROJECT = Path(__file__).parents[2]

COUNTS = sparse.csr_matrix(np.array([[3, 0, 1, 0], [0, 0, 0, 0], [0, 2, 0, 70]]))
WORDS = b"alpha\nbeta\ngamma\ndelta\n"
UCI = b"3\n4\n4\n1 1 3\n1 3 1\n3 2 2\n3 4 70\n"
LABELS = b"0\tfood\n1\tfruit\n2\tapple\n3\ttools\n"
EDGES = b"0\t1\n1\t2\n"
TERMS = b"fruit:sweet,juicy\napple:red\n"
TEXTS = ["an apple a day", "tools, and more tools", 'a "quoted" apple']
EVERY_WORD = Tokenization(min_df=1, max_df=1.0, stop_words=None)


@dataclass(frozen=True)
class Reader:
    seeds: tuple[bytes, ...]
    check: Callable[[bytes, Path], bool]


def named(path: Path | str, read: Callable[[], object]) -> object:
    """What is read; its ConfigError names the file and is not as long as it."""
    try:
        return read()
    except ConfigError as error:
        text = str(error)
        assert str(path) in text, text
        assert len(text) < 10_010, len(text)
        raise


def stored(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# configuration


def _configuration(content: bytes, folder: Path) -> bool:
    path = stored(folder, "my.yaml", content)
    document = named(path, lambda: config.read(path))
    found = named(path, lambda: config.resolve(document, (), "cpu", []))
    again = config.parse(yaml.safe_dump(found.resolved()), "config.yaml")
    assert config.resolve(again, (), "cpu", []).settings == found.settings
    return True


def _override(content: bytes, folder: Path) -> bool:
    document = config.parse("experiment: example_experiment", "my.yaml")
    # as the operating system hands over arguments
    text = content.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    found = named("command line", lambda: config.resolve(document, [text], "cpu", []))
    again = config.parse(yaml.safe_dump(found.resolved()), "config.yaml")
    assert config.resolve(again, (), "cpu", []).settings == found.settings
    return True


# corpora


def _uci_slowly(content: bytes) -> dict[tuple[int, int], float]:
    """The entries, read in the plainest way."""
    lines = [line.split() for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    triples = [tuple(map(float, line)) for line in lines[3:]]
    assert len(triples) == int(lines[2][0]), "fewer or more entries than declared"
    counted = [(int(d) - 1, int(w) - 1, c) for d, w, c in triples if c]
    found = {(d, w): c for d, w, c in counted}
    assert len(found) == len(counted), "an entry twice"
    return found


def _uci(content: bytes, folder: Path, *, gz: bool = False) -> bool:
    suffix = ".gz" if gz else ""
    stored(folder, f"vocab.x.txt{suffix}", gzip.compress(WORDS) if gz else WORDS)
    path = stored(folder, f"docword.x.txt{suffix}", content)
    corpus = named(path, lambda: load_uci(folder, "x"))
    plain = gzip.decompress(content) if gz else content
    plain = plain.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    matrix = corpus.counts.tocoo()
    cells = zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data.tolist(), strict=True)
    assert {(d, w): c for d, w, c in cells} == _uci_slowly(plain)
    return True


def _vocabulary(content: bytes, folder: Path) -> bool:
    path = stored(folder, "vocab.x.txt", content)
    stored(folder, "docword.x.txt", UCI)
    corpus = named("vocab.x.txt", lambda: load_uci(folder, "x"))
    lines = path.read_text("utf-8-sig").strip("\n").split("\n")
    assert list(corpus.vocabulary) == [line.strip() for line in lines]
    return True


def _bow(content: bytes, folder: Path) -> bool:
    path = stored(folder, "X_x_val_bow.npz", content)
    corpus = named(path, lambda: load_bow(folder, "x"))
    assert corpus.fingerprint == make_corpus("x", COUNTS, source="").fingerprint
    return True


def _cached_docstrings(content: bytes, folder: Path) -> bool:
    path = stored(folder, "docstrings.json.gz", content)
    assert named(path, lambda: docstrings.read_cached(path)) == RECORDS
    return True


def _lines(content: bytes, folder: Path) -> bool:
    path = stored(folder, "x.txt", content)
    corpus = named(path, lambda: load_text(folder, "x", EVERY_WORD))
    lines = path.read_text("utf-8-sig").split("\n")
    documents = len(lines) - (not lines[-1])
    assert corpus.documents + corpus.dropped_documents == documents
    return True


def _column(content: bytes, folder: Path, *, form: str) -> bool:
    path = stored(folder, f"x.{form}", content)
    corpus = named(path, lambda: load_table(folder, "x", form, tokenization=EVERY_WORD))
    if form == "jsonl":
        lines = [line for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
        assert corpus.documents + corpus.dropped_documents == len(lines)
    elif form == "parquet":
        rows = pq.read_metadata(path).num_rows
        assert corpus.documents + corpus.dropped_documents == rows
    return True


def _rows(content: bytes, folder: Path, *, suffix: str) -> bool:
    path = stored(folder, f"x{suffix}", content)
    table = named(path, lambda: table_of(path))
    assert len(table)
    table.validate(full=True)
    return True


# taxonomy


def _pairs(content: bytes) -> list[tuple[str, str]]:
    text = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode("utf-8-sig")
    rows = [line.split("\t") for line in text.split("\n") if line.strip()]
    assert all(len(row) == 2 for row in rows)
    return [(left.strip(), right.strip()) for left, right in rows]


def _labels(content: bytes, folder: Path) -> bool:
    path = stored(folder, "labels.txt", content)
    edges = stored(folder, "edges.txt", EDGES)
    taxonomy = named(folder, lambda: read_taxonomy(path, edges))
    assert list(zip(taxonomy.ids, taxonomy.names, strict=True)) == _pairs(content)
    return True


def _hierarchy(content: bytes, folder: Path) -> bool:
    path = stored(folder, "edges.txt", content)
    labels = stored(folder, "labels.txt", LABELS)
    taxonomy = named(path, lambda: read_taxonomy(labels, path))
    found = [(taxonomy.ids[p], taxonomy.ids[c]) for p, c in taxonomy.edges]
    assert sorted(found) == sorted(set(_pairs(content)))
    assert taxonomy.depth.max() <= len(taxonomy)
    return True


def _keywords(content: bytes, folder: Path) -> bool:
    path = stored(folder, "terms.txt", content)
    labels = stored(folder, "labels.txt", LABELS)
    edges = stored(folder, "edges.txt", EDGES)
    taxonomy = named(path, lambda: read_taxonomy(labels, edges, path))
    text = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode("utf-8-sig")
    for line in filter(str.strip, text.split("\n")):
        name, _, terms = (part.strip() for part in line.rpartition(":"))
        if name in taxonomy.names:
            have = taxonomy.keywords[taxonomy.names.index(name)]
            assert {t.strip() for t in terms.split(",")} - {""} <= set(have)
    return True


@cache
def _taxonomy() -> object:
    rows = [Row("here", *pair) for pair in _pairs(LABELS)]
    return make_taxonomy(rows, [Row("here", *pair) for pair in _pairs(EDGES)], source="here")


def _annotations(content: bytes, folder: Path) -> bool:
    path = stored(folder, "answers.json", content)
    found = named(path, lambda: read_annotations(path, _taxonomy()))
    assert set(found) == set(json.loads(content))
    return True


def _documents(content: bytes, folder: Path, *, suffix: str) -> bool:
    path = stored(folder, f"x{suffix}", content)
    documents = named(path, lambda: read_documents(path, _taxonomy()))
    total = len(documents) + documents.dropped.get("empty documents", 0)
    if suffix in (".jsonl", ".txt"):
        text = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode("utf-8-sig")
        assert total == sum(bool(line.strip()) for line in text.split("\n"))
    documents.texts.validate(full=True)
    assert documents.fingerprint
    return True


def _gold(content: bytes, folder: Path) -> bool:
    path = stored(folder, "gold.txt", content)
    texts = stored(folder, "x.txt", b"a\tsome text\nb\tmore text\n")
    documents = named(path, lambda: read_documents(texts, _taxonomy(), labels=path))
    gold = dict(_pairs(content))
    for row, name in enumerate(documents.ids.to_pylist()):
        wanted = {_taxonomy().ids.index(c) for c in gold.get(name, "").replace(",", " ").split()}
        assert wanted <= set(documents.gold[row].indices.tolist())
    return True


# what raypipe itself has written


def _run(folder: Path) -> RunDirectory:
    return RunDirectory.at(folder / "run")


@cache
def _checkpoint() -> tuple[object, Mapping[str, bytes]]:
    import torch

    from raypipe.training.checkpoint import Checkpoint, CheckpointStore

    written: dict[str, bytes] = {}
    run = RunDirectory("memory")
    run.__dict__["_opened"] = (None, "memory")

    @contextmanager
    def writing(path: str, **_: bool) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        yield stream
        written[path] = stream.getvalue()

    run.__dict__["writing"] = writing
    run.__dict__["list"] = lambda folder: []
    state = {"state": {0: {"step": 5, "mean": torch.arange(4.0)}}, "groups": [{"lr": 0.1}]}
    model = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
    checkpoint = Checkpoint(5, model, state, {"scale": 2.0})
    CheckpointStore(run, "t").save(checkpoint)
    return checkpoint, {path.rpartition("/")[2]: content for path, content in written.items()}


def _checkpoint_file(content: bytes, folder: Path, *, name: str, forged: bool = False) -> bool:
    """``forged``: the manifest vouches for the file."""
    import hashlib

    import torch

    from raypipe.training.checkpoint import CheckpointStore

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
        assert {n: t.tolist() for n, t in found.model.items()} == {
            n: t.tolist() for n, t in checkpoint.model.items()
        }
        assert torch.equal(found.optimizer["state"][0]["mean"], torch.arange(4.0))
        assert found.scaler == checkpoint.scaler
    return True


def _weights(content: bytes, folder: Path) -> bool:
    from raypipe.training.weights import read_weights

    run = _run(folder)
    path = run.model("t")
    run.write(path, content)
    found, metadata = named(path, lambda: read_weights(run, path))
    checkpoint, _ = _checkpoint()
    assert metadata["model"] == "{}"
    assert {n: t.tolist() for n, t in found.items()} == {
        n: t.tolist() for n, t in checkpoint.model.items()
    }
    return True


@cache
def _weights_file() -> bytes:
    from raypipe.training.weights import write_weights

    written: list[bytes] = []
    run = RunDirectory("memory")
    run.__dict__["write"] = lambda path, content: written.append(content)
    write_weights(run, "t", _checkpoint()[0].model, {"model": "{}"})
    return written[0]


ROWS = {"a": {"x": 1.5}, "b": {"x": [1, None, "ü"]}, "c": {"x": {"y": True}}}


def _ledger(content: bytes, folder: Path) -> bool:
    run = _run(folder)
    run.delete(run.ledger)
    run.write(f"{run.ledger}/00000000.jsonl", content)
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append
    log = logging.getLogger("raypipe.store.ledger")
    log.addHandler(handler)
    log.propagate = False
    try:
        ledger = Ledger(run, writable=False)
        found = ledger.items("evaluations")
        if Ledger(run).tables() or found:
            assert Ledger(run).items("evaluations") == found, "opening it changed it"
    finally:
        log.removeHandler(handler)
        log.propagate = True
    assert _within(found)
    if len(found) < len(ROWS):  # what is cut off after whole lines was never there
        cut = content.endswith(b"\n") or not content
        is_told = told or ledger.damage
        assert is_told or (cut and LEDGER.startswith(content)), "rows are missing without a word"
        assert not (ledger.damage and ledger.rows("units"))
    return len(found) == len(ROWS)


def _within(found: list[tuple[str, object]]) -> bool:
    return all(ROWS.get(key) == row for key, row in found)


@cache
def _ledger_file() -> bytes:
    from raypipe.store.ledger import _encode

    rows = [("evaluations", key, row) for key, row in ROWS.items()]
    return _encode([*rows, *(("units", key, {}) for key in ROWS)], 0)


LEDGER = _ledger_file()
TABLE = {"n": list(range(50)), "text": [f"row {i}" for i in range(50)], "x": [0.5] * 50}


def _table(content: bytes, folder: Path) -> bool:
    run = _run(folder)
    run.write(run.partition("evaluations"), content)
    frame = named(run.partition("evaluations"), lambda: results.read_table(run, "evaluations"))
    _same(frame.to_dict("list"))
    return True


def _artifact(content: bytes, folder: Path) -> bool:
    run = _run(folder)
    path = run.artifact("stage", "x.parquet")
    run.write(path, content)
    _same(named(path, lambda: artifacts.read_parquet(run, path)).to_pydict())
    return True


def _same(found: Mapping[str, list[object]]) -> None:
    """Values are under checksums of pages; names and types of columns are not."""
    assert all(len(values) == 50 for values in found.values())


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
    stored(folder, "x.sqlite", content)
    for name in ("x.sqlite-wal", "x.sqlite-journal", "x.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    with _cache_at(folder), caches.Cache("x") as kept:
        found = kept.get(ROWS)
        kept.put({"new": {"x": 1}})
    assert _within(list(found.items()))
    return len(found) == len(ROWS)


@cache
def _cache_file() -> bytes:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        with _cache_at(Path(folder)), caches.Cache("x") as kept:
            kept.put(ROWS)
        return (Path(folder) / "x.sqlite").read_bytes()


def _lease(content: bytes, folder: Path) -> bool:
    return bool(lock.parsed(content))


def _gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def _npz(**arrays: object) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _npz_matrix(matrix: object) -> bytes:
    stream = io.BytesIO()
    sparse.save_npz(stream, matrix)
    return stream.getvalue()


RECORDS = tuple(
    docstrings.DocstringRecord("m", f"f{i}", "function", t) for i, t in enumerate(TEXTS)
)


@cache
def _cached_docstrings_file() -> bytes:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "c.gz"
        docstrings.write_cached(path, RECORDS)
        return path.read_bytes()


JSONL = "".join(
    json.dumps({"id": i, "text": t, "labels": ["1"]}) + "\n" for i, t in enumerate(TEXTS)
)
CSV = pd.DataFrame({"id": range(3), "text": TEXTS, "labels": "1 2"}).to_csv(index=False)
TXT = "".join(f"d{i}\t{text}\n" for i, text in enumerate(TEXTS))
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
    found = {
        "configuration": Reader((MY_YAML,), _configuration),
        "override": Reader((b"study.options.a={b: [1, x]}", b"fit.training.steps=1e2"), _override),
        "uci": Reader((UCI,), _uci),
        "uci.gz": Reader((_gz(UCI),), partial(_uci, gz=True)),
        "vocabulary": Reader((WORDS,), _vocabulary),
        "bow": Reader((_npz_matrix(COUNTS), _npz_matrix(COUNTS.tocoo())), _bow),
        "docstrings": Reader((_cached_docstrings_file(),), _cached_docstrings),
        "lines": Reader((TXT.encode(),), _lines),
        "labels": Reader((LABELS,), _labels),
        "hierarchy": Reader((EDGES,), _hierarchy),
        "keywords": Reader((TERMS,), _keywords),
        "annotations": Reader((b'{"a": "1", "b": {"labels": ["2", 3]}}',), _annotations),
        "gold": Reader((b"a\t1,2\nb\t0 3\n",), _gold),
        "weights": Reader((_weights_file(),), _weights),
        "ledger": Reader((LEDGER,), _ledger),
        "table": Reader((artifacts.to_bytes(pa.table(TABLE)),), _table),
        "artifact": Reader((artifacts.to_bytes(pa.table(TABLE)),), _artifact),
        "cache": Reader((_cache_file(),), _cache),
        "lease": Reader((b'{"owner": "a", "host": "h", "pid": 3, "beat": 2}',), _lease),
    }
    for form, content in (("jsonl", JSONL.encode()), ("csv", CSV.encode()), ("parquet", PARQUET)):
        found[f"column.{form}"] = Reader((content,), partial(_column, form=form))
        found[f"documents.{form}"] = Reader((content,), partial(_documents, suffix=f".{form}"))
        found[f"rows.{form}"] = Reader((content,), partial(_rows, suffix=f".{form}"))
    found["documents.txt"] = Reader((TXT.encode(),), partial(_documents, suffix=".txt"))
    arrays = _npz(x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    found["rows.npz"] = Reader((arrays,), partial(_rows, suffix=".npz"))
    for name, content in _checkpoint()[1].items():
        found[f"checkpoint/{name}"] = Reader((content,), partial(_checkpoint_file, name=name))
        if name != "manifest.json":
            forged = partial(_checkpoint_file, name=name, forged=True)
            found[f"forged/{name}"] = Reader((content,), forged)
    return found
