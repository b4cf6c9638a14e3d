"""The taxonomy: its graph against brute force, the layouts of its files, what is refused."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from experiments.teleclass.taxonomy import Taxonomy, read_taxonomy
from tests.experiments.teleclass.sections import taxonomy_of

LABELS = "s\tscience\np\tphysics_lab\nc\tchemistry\nq\tquantum_chemistry\n"
EDGES = "s\tp\ns\tc\np\tq\nc\tq\n"


@st.composite
def graphs(draw) -> tuple[int, list[tuple[int, int]]]:
    """Classes in a random order and edges that all go one way along another random order."""
    size = draw(st.integers(1, 9))
    order = draw(st.permutations(range(size)))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    drawn = draw(st.lists(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=20))
    return size, [(order[min(pair)], order[max(pair)]) for pair in drawn] if size > 1 else []


def build(size: int, edges: list[tuple[int, int]]) -> Taxonomy:
    return taxonomy_of(map(str, range(size)), [(str(a), str(b)) for a, b in edges])


def paths_up(taxonomy: Taxonomy, c: int) -> list[list[int]]:
    """Every path from a class to a root."""
    above = [a for a, b in taxonomy.edges if b == c]
    return [[c, *path] for a in above for path in paths_up(taxonomy, a)] or [[c]]


def write(folder: Path, labels: str | bytes = LABELS, edges: str | bytes = EDGES, terms="") -> list:
    contents = {"labels.txt": labels, "hierarchy.txt": edges, "keywords.txt": terms}
    for name, content in contents.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return [folder / name for name in contents]


@given(graphs())
def test_graph_equals_brute_force(graph):
    size, edges = graph
    taxonomy = build(size, edges)
    assert taxonomy.edges == tuple(sorted(set(edges)))
    assert taxonomy.dropped.get("repeated edges", 0) == len(edges) - len(set(edges))
    for c in range(size):
        paths = paths_up(taxonomy, c)
        assert taxonomy.depth[c] == max(map(len, paths))
        assert set(taxonomy.ancestors[c].indices) == set().union(*paths)
        assert set(taxonomy.parents[c]) == {a for a, b in edges if b == c}
        assert set(taxonomy.children[c]) == {b for a, b in edges if a == c}
    assert set(np.flatnonzero(taxonomy.depth == 1)) == set(range(size)) - {b for _, b in edges}
    assert taxonomy.depth.dtype == np.int64
    assert taxonomy.ancestors.dtype == np.bool_


@given(graphs(), st.data())
def test_closure_adds_the_ancestors_and_nothing_else(graph, data):
    taxonomy = build(*graph)
    size = len(taxonomy)
    rows = data.draw(st.lists(st.sets(st.integers(0, size - 1)), max_size=5))
    labels = sparse.lil_matrix((len(rows), size), dtype=np.bool_)
    for i, row in enumerate(rows):
        labels[i, list(row)] = True
    closed = taxonomy.closure(labels.tocsr())
    assert closed.dtype == np.bool_
    assert closed.has_canonical_format
    for i, row in enumerate(rows):
        expected = {a for c in row for path in paths_up(taxonomy, c) for a in path}
        assert set(closed[i].indices) == expected
    assert (taxonomy.closure(closed) != closed).nnz == 0


def test_files_of_the_layout(tmp_path):
    terms = "physics_lab:optics, laser_beam,,optics\nalchemy:gold\nscience:\n"
    terms += "physics_lab:optics,atom\n"
    taxonomy = read_taxonomy(*write(tmp_path, edges=f"{EDGES}\ns\tp\n", terms=terms))
    assert taxonomy.ids == ("s", "p", "c", "q")
    assert taxonomy.names[1] == "physics_lab"
    assert taxonomy.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert taxonomy.keywords == ((), ("optics", "laser_beam", "atom"), (), ())
    assert taxonomy.dropped == {"repeated edges": 1, "keywords of unknown classes": 1}
    lab = "physics lab: optics, laser beam, atom"
    assert taxonomy.descriptions() == ["science", lab, "chemistry", "quantum chemistry"]
    assert taxonomy.depth.tolist() == [1, 2, 2, 3]


def test_compressed_and_windows_files_are_the_same_taxonomy(tmp_path):
    paths = write(tmp_path, terms="science:lab")
    plain = read_taxonomy(*paths)
    packed = [path.with_name(f"{path.name}.gz") for path in paths]
    for path, gz in zip(paths, packed, strict=True):
        content = path.read_bytes()
        gz.write_bytes(gzip.compress(content))
        path.write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
    for other in (paths, packed):
        again = read_taxonomy(*other)
        assert again == plain
        assert again.fingerprint == plain.fingerprint


def test_a_name_may_be_that_of_several_classes_and_hold_a_colon(tmp_path):
    labels = "0\tother: misc\n1\tbooks\n2\tother: misc\n"
    taxonomy = read_taxonomy(*write(tmp_path, labels, "", "other: misc:this,that\n"))
    assert taxonomy.keywords == (("this", "that"), (), ("this", "that"))


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    first = read_taxonomy(*write(tmp_path, terms="science:lab"))
    shuffled = read_taxonomy(
        *write(tmp_path, edges="c\tq\np\tq\ns\tc\ns\tp\ns\tc\n", terms="science:lab")
    )
    assert shuffled.fingerprint == first.fingerprint
    assert pickle.loads(pickle.dumps(first)).fingerprint == first.fingerprint
    others = [
        read_taxonomy(*write(tmp_path)),
        read_taxonomy(*write(tmp_path, edges="s\tp\n", terms="science:lab")),
        read_taxonomy(*write(tmp_path, LABELS.replace("chem", "Chem"), terms="science:lab")),
        read_taxonomy(*write(tmp_path, LABELS.replace("q\t", "z\t"), "", "science:lab")),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_amazon_531(data_dir):
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
