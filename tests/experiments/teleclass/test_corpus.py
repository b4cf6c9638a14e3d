"""The taxonomy against brute force, documents and their labels, and the layouts of their files."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from experiments.teleclass.corpus import builtin_documents, read_annotations
from experiments.teleclass.documents import Documents, read_documents
from experiments.teleclass.taxonomy import Taxonomy, read_taxonomy
from tests.experiments.rows import write_rows, write_text
from tests.experiments.teleclass.conftest import taxonomy_of
from tests.scenario import cases

CLASSES = "s\tscience\np\tphysics_lab\nc\tchemistry\nq\tquantum_chemistry\n"
EDGES = "s\tp\ns\tc\np\tq\nc\tq\n"
NAMES = ("labels.txt", "hierarchy.txt", "keywords.txt")


@st.composite
def graphs(draw) -> tuple[int, list[tuple[int, int]]]:
    """Classes in a random order and edges that all go one way along another random order."""
    size = draw(st.integers(1, 9))
    order = draw(st.permutations(range(size)))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    drawn = draw(st.lists(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=20))
    return size, [(order[min(pair)], order[max(pair)]) for pair in drawn] if size > 1 else []


def paths_up(taxonomy: Taxonomy, c: int) -> list[list[int]]:
    """Every path from a class to a root."""
    above = [a for a, b in taxonomy.edges if b == c]
    return [[c, *path] for a in above for path in paths_up(taxonomy, a)] or [[c]]


def stored(folder: Path, labels: str = CLASSES, edges: str = EDGES, terms: str = "") -> Taxonomy:
    """The taxonomy of files with these contents."""
    contents = zip(NAMES, (labels, edges, terms), strict=True)
    return read_taxonomy(*(write_text(folder / name, content) for name, content in contents))


@given(graphs(), st.lists(st.sets(st.integers(0, 8)), max_size=5))
def test_the_graph_and_the_closure_of_labels_equal_brute_force(graph, rows):
    size, edges = graph
    taxonomy = taxonomy_of(map(str, range(size)), [(str(a), str(b)) for a, b in edges])
    assert taxonomy.edges == tuple(sorted(set(edges)))
    assert taxonomy.dropped.get("repeated edges", 0) == len(edges) - len(set(edges))
    above = []
    for c in range(size):
        paths = paths_up(taxonomy, c)
        above.append(set().union(*paths))
        assert taxonomy.depth[c] == max(map(len, paths))
        assert set(taxonomy.ancestors[c].indices) == above[c]
        assert set(taxonomy.parents[c]) == {a for a, b in edges if b == c}
        assert set(taxonomy.children[c]) == {b for a, b in edges if a == c}
    labels = sparse.lil_matrix((len(rows), size), dtype=np.bool_)
    for i, row in enumerate(rows):
        labels[i, [c for c in row if c < size]] = True
    closed = taxonomy.closure(labels.tocsr())
    assert closed.dtype == taxonomy.ancestors.dtype == np.bool_
    assert closed.has_canonical_format
    for i, row in enumerate(rows):
        assert set(closed[i].indices) == set().union(*(above[c] for c in row if c < size))


@pytest.mark.parametrize("case", cases(__file__, "taxonomies"))
def test_the_taxonomy_of_files(tmp_path, case):
    taxonomy = stored(tmp_path, *case["files"])
    found = {name: getattr(taxonomy, name) for name in ("ids", "names", "edges", "keywords")}
    found |= {"dropped": taxonomy.dropped, "descriptions": taxonomy.descriptions()}
    assert json.loads(json.dumps(found)) == case["gives"]


def test_compressed_and_windows_files_are_the_same_taxonomy(tmp_path):
    plain = stored(tmp_path, terms="science:lab")
    paths = [tmp_path / name for name in NAMES]
    packed = [write_text(tmp_path / f"{path.name}.gz", path.read_text()) for path in paths]
    for path in paths:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    for other in (paths, packed):
        again = read_taxonomy(*other)
        assert again == plain
        assert again.fingerprint == plain.fingerprint


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    first = stored(tmp_path, terms="science:lab")
    shuffled = stored(tmp_path, edges="c\tq\np\tq\ns\tc\ns\tp\ns\tc\n", terms="science:lab")
    assert shuffled.fingerprint == first.fingerprint
    assert pickle.loads(pickle.dumps(first)).fingerprint == first.fingerprint
    others = [
        stored(tmp_path),
        stored(tmp_path, edges="s\tp\n", terms="science:lab"),
        stored(tmp_path, CLASSES.replace("chem", "Chem"), terms="science:lab"),
        stored(tmp_path, CLASSES.replace("q\t", "z\t"), "", "science:lab"),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_amazon_531_has_the_published_taxonomy_and_labels(data_dir, tmp_path):
    folder = data_dir / "teleclass_amazon531"
    read = [
        read_taxonomy(folder / "labels.txt", folder / "label_hierarchy.txt", folder / name)
        for name in ("llm_enrichment.txt", "enrichment.txt")
    ]
    for taxonomy in read:
        assert (len(taxonomy), len(taxonomy.edges)) == (531, 568)
        assert (taxonomy.depth == 1).sum() == 6
        assert sum(not below for below in taxonomy.children) == 462
        assert sum(len(parents) >= 2 for parents in taxonomy.parents) == 25
        assert np.bincount(taxonomy.depth).tolist() == [0, 6, 63, 455, 7]
        assert taxonomy.dropped == {}
    assert all(read[0].keywords)
    assert sum(not terms for terms in read[1].keywords) == 60 + 18  # without a line, without terms
    assert read[0].descriptions()[2].startswith("jerky: beef, turkey, chicken")
    sample = read_documents(
        folder / "test_corpus_sample.txt", read[0], labels=folder / "test_doc2labels.txt.gz"
    )
    assert (len(sample), sample.ids[0].as_py()) == (10, "0")
    assert sample.dropped == {"gold of other documents": 19_648}
    corpus = write_text(tmp_path / "train.txt", "".join(f"{i}\tx\n" for i in range(29_487)))
    labels = read_documents(corpus, read[0], labels=folder / "train_doc2labels.txt.gz")
    assert labels.dropped == {}
    assert labels.gold.sum() / 29_487 >= 2.93
    generated = read_documents(folder / "generated_docs.txt.gz", read[0])
    assert (len(generated), generated.gold) == (2555, None)


TAXONOMY = taxonomy_of(("0", "10", "11", "12"), [("0", "10"), ("10", "11")])
LAYOUTS = cases(__file__, "layouts")
#: those with texts that readers like to damage
ROWS = LAYOUTS[0]["rows"]


def save(path: Path, rows: list[dict] | str = ROWS) -> Path:
    """Rows in the layout of the suffix."""
    if isinstance(rows, str):
        return write_text(path, rows)
    if ".csv" in path.suffixes:
        rows = [row | {"labels": ", ".join(row["labels"])} for row in rows]
    return write_rows(path, rows)


@pytest.mark.parametrize(
    ("case", "suffix"), [(case, suffix) for case in LAYOUTS for suffix in case["suffixes"]]
)
def test_what_is_read_of_every_layout(tmp_path, case, suffix):
    path, options = save(tmp_path / f"train.v1{suffix}", case["rows"]), case.get("options", {})
    if "gold" in case:
        options = {"labels": write_text(tmp_path / "gold.txt.gz", case["gold"])}
    read = read_documents(path, TAXONOMY, **options)
    assert read.ids.type == read.texts.type == pa.large_string()
    found = {"ids": read.ids.to_pylist(), "texts": read.texts.to_pylist(), "gold": None}
    if read.gold is not None:
        assert (read.gold.dtype, read.gold.shape) == (np.bool_, (len(read), len(TAXONOMY)))
        found["gold"] = [row.indices.tolist() for row in read.gold]
    assert found | {"dropped": read.dropped} == case["gives"]


def test_one_content_has_one_fingerprint_however_it_is_stored_and_any_slice_of_texts(tmp_path):
    whole = read_documents(save(tmp_path / "a.jsonl"), TAXONOMY)
    texts = [row["text"] for row in ROWS]
    assert (whole.text_list(2, 4), whole.text_list(5, 99)) == (texts[2:4], texts[5:])
    same = [
        read_documents(save(tmp_path / "a.parquet"), TAXONOMY),
        whole.take(range(len(whole))),
        pickle.loads(pickle.dumps(whole)),
    ]
    assert {d.fingerprint for d in same} == {whole.fingerprint}
    others = [
        whole.take([1, 0, 2, 3, 4, 5, 6]),
        Documents(whole.texts, whole.ids, whole.gold, {}),
        Documents(whole.ids, whole.texts, None, {}),
    ]
    assert whole.fingerprint not in {d.fingerprint for d in others}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_sample_has_the_smallest_hashes_and_is_part_of_larger_ones(tmp_path, suffix):
    rows = [{"id": f"d{i}", "text": "x" * (i % 5), "labels": ["11"] * (i % 2)} for i in range(40)]
    path = save(tmp_path / f"a{suffix}", rows)
    full = read_documents(path, TAXONOMY)
    ids = full.ids.to_pylist()
    by_hash = sorted(ids, key=lambda i: hashlib.sha256(i.encode()).digest())
    for size in (1, 3, 11, 32, 50):
        read = read_documents(path, TAXONOMY, max_documents=size)
        assert read.ids.to_pylist() == [name for name in ids if name in by_hash[:size]]
        assert read.fingerprint == full.sample(size).fingerprint
        beyond = {"documents beyond max_documents": 32 - size} if size < 32 else {}
        assert read.dropped == {"empty documents": 8} | beyond
    assert full.sample(None) is full


@pytest.mark.parametrize("key", [None, "core_classes", "core classes", "labels"])
def test_annotations_of_every_form(tmp_path, key):
    given = {"x": ["b", "a"], "y": "7", "z": 7, "none": [], "twice": ["a", "b", "a"]}
    if key is not None:
        given = {name: {key: classes, "other": 1} for name, classes in given.items()}
    path = write_text(tmp_path / "labels.json.gz", json.dumps(given))
    expected = {"x": [1, 0], "y": [2], "z": [2], "none": [], "twice": [0, 1]}
    assert read_annotations(path, taxonomy_of("ab7")) == expected


def test_classes_follow_the_dotted_names_and_samples_the_names_of_documents():
    taxonomy, train, test = builtin_documents()
    assert len(taxonomy) > 100
    assert taxonomy.depth.max() >= 3
    assert {"xml", "xml.dom", "xml.dom.minidom"} <= set(taxonomy.ids)
    assert taxonomy.names[taxonomy.ids.index("xml.dom.minidom")] == "xml dom minidom"
    for parent, child in taxonomy.edges:
        assert taxonomy.ids[child].rpartition(".")[0] == taxonomy.ids[parent]
    assert taxonomy.depth.tolist() == [id_.count(".") + 1 for id_ in taxonomy.ids]
    sizes = np.asarray(train.gold.sum(axis=0) + test.gold.sum(axis=0)).ravel()
    assert sizes.min() >= 12
    assert len(test) / (len(train) + len(test)) == pytest.approx(0.3, abs=0.03)
    assert not set(train.ids.to_pylist()) & set(test.ids.to_pylist())
    small = builtin_documents(200)
    assert small[0].fingerprint == taxonomy.fingerprint
    whole = [documents.sample(200).ids for documents in (train, test)]
    assert [documents.ids for documents in small[1:]] == whole
