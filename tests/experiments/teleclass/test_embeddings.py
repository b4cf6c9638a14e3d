"""Stored vectors: what comes back, and what damage is noticed."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.teleclass.embeddings import Embeddings
from raypipe.store.artifacts import read_arrow, write_arrow
from raypipe.store.run_directory import RunDirectory


def store(run: RunDirectory, rows: int = 10, block: int = 4) -> tuple[Embeddings, np.ndarray]:
    vectors = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)
    embeddings = Embeddings(run, "train", rows, block)
    for number in range(len(embeddings)):
        start, stop = embeddings.bounds(number)
        embeddings.write(number, vectors[start:stop], f"block {number}")
    return embeddings, vectors


@pytest.mark.parametrize(("rows", "block"), [(10, 4), (8, 4), (1, 4), (5, 1)])
def test_vectors_come_back_as_they_were(anywhere, rows, block):
    embeddings, vectors = store(anywhere, rows, block)
    assert len(embeddings) == -(-rows // block)
    parts = list(embeddings.blocks())
    assert [start for start, _ in parts] == list(range(0, rows, block))
    np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), vectors)
    assert all(embeddings.holds(n, f"block {n}") for n in range(len(embeddings)))
    other = replace(embeddings, name="test")
    assert not other.holds(0, "block 0")
    with pytest.raises(OSError, match="test"):
        other.read(0)


def test_a_local_block_is_mapped_and_not_copied(tmp_path):
    embeddings, _ = store(RunDirectory.at(tmp_path))
    vectors = pickle.loads(pickle.dumps(embeddings)).read(1)
    start = vectors.__array_interface__["data"][0]
    mapped = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in open("/proc/self/maps")  # noqa: SIM115, PTH123
        if "000001.arrow" in line
    ]
    assert any(first <= start < last for first, last in mapped)
    with pytest.raises(ValueError, match="read-only"):
        vectors[0] = 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(rows=st.lists(st.integers(0, 9), max_size=20))
def test_rows_in_any_order_with_repeats(anywhere, rows):
    embeddings, vectors = store(anywhere)
    chosen = np.array(rows, np.int64)
    found = embeddings.read_rows(chosen)
    assert found.shape == (len(rows), 3)
    np.testing.assert_array_equal(found, vectors[chosen])


def test_a_block_of_another_fingerprint_or_number_of_rows_is_not_held(anywhere):
    embeddings, vectors = store(anywhere)
    assert not embeddings.holds(0, "block 1")
    embeddings.write(0, vectors[:3], "block 0")
    assert not embeddings.holds(0, "block 0")
    embeddings.write(0, vectors[:4], "block 0")
    assert embeddings.holds(0, "block 0")
    path = embeddings._path(0)
    write_arrow(anywhere, path, read_arrow(anywhere, path).replace_schema_metadata(None))
    assert not embeddings.holds(0, "block 0")


def test_no_damage_is_taken_for_the_vectors(anywhere):
    embeddings, vectors = store(anywhere)
    path = embeddings._path(0)
    whole = anywhere.read(path)
    for place in range(0, len(whole), 1 if anywhere.is_local else 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        anywhere.delete(path)
        with anywhere.fs.open_output_stream(path) as stream:  # without waiting for the disk
            stream.write(bytes(damaged))
        if embeddings.holds(0, "block 0"):  # some bytes are padding
            np.testing.assert_array_equal(embeddings.read(0), vectors[:4])
    values = whole.index(vectors[:4].tobytes())
    for place in range(values, values + vectors[:4].nbytes, 5):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        anywhere.write(path, bytes(damaged))
        assert not embeddings.holds(0, "block 0")


def test_a_truncated_file_is_not_held(anywhere):
    embeddings, _ = store(anywhere)
    path = embeddings._path(0)
    whole = anywhere.read(path)
    for length in range(0, len(whole), 41):
        anywhere.write(path, whole[:length])
        assert not embeddings.holds(0, "block 0")
