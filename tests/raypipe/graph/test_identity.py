from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.graph.identity import canonical_json, differences, fingerprint

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(plain)
def test_the_value_can_be_read_back_so_different_values_differ(value: Any) -> None:
    back = json.loads(canonical_json(value))
    assert repr(_sorted(back)) == repr(_sorted(value))  # repr: 1, 1.0 and true are told apart


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), plain, max_size=6), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], random: Any) -> None:
    keys = list(value)
    random.shuffle(keys)
    shuffled = {key: value[key] for key in keys}
    assert canonical_json(shuffled) == canonical_json(value)
    assert fingerprint({"in": [shuffled]}) == fingerprint({"in": [value]})


def test_a_fingerprint_stays_what_it_is() -> None:
    """Stored ledgers hold them: a change of the form would run everything again."""
    identity = {"version": 1, "seed": 42, "rate": 1e-3, "start": (2, 5), "name": "ä", "none": None}
    form = '{"name":"\\u00e4","none":null,"rate":0.001,"seed":42,"start":[2,5],"version":1}'
    assert canonical_json(identity) == form
    assert fingerprint(identity) == "4cd606ba847e32a500bfec104b170508"


@pytest.mark.parametrize(
    "value",
    [Path("x"), len, lambda: None, {1}, frozenset(), b"x", bytearray(b"x"), object(), range(3),
     np.arange(3), np.float32(1), np.int64(1), {1: 2}, {None: 1}, {True: 1}, 1j,
     memoryview(b"ab")],
)  # fmt: skip
def test_values_without_a_stable_form_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="identity"):
        fingerprint({"a": {"b": [(value,)]}})


def test_differences_name_the_dotted_keys() -> None:
    stored = {"lda": {"seed": 1, "start": [1, 2], "gone": None}, "same": {"x": 1}, "kind": {"a": 1}}
    asked = {"lda": {"seed": 2, "start": (1, 2), "new": None}, "same": {"x": 1}, "kind": 3}
    assert differences(stored, asked) == {
        "lda.seed": (1, 2),
        "lda.gone": (None, None),
        "lda.new": (None, None),
        "kind": ({"a": 1}, 3),
    }


@given(st.dictionaries(st.text(), plain, max_size=4), st.dictionaries(st.text(), plain, max_size=4))
def test_there_are_differences_exactly_where_fingerprints_differ(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    assert bool(differences(left, right)) == (fingerprint(left) != fingerprint(right))
    assert differences({"a": [math.nan]}, {"a": [float("nan")]}) == {}
