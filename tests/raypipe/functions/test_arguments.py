"""Arguments of calls: products, ranges, and signatures."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config.axes import values_of
from raypipe.errors import ConfigError
from raypipe.functions.arguments import calls, check_signature, count, keywords

plain = st.one_of(st.integers(-9, 9), st.booleans(), st.text("abc", max_size=3), st.none())
values = st.one_of(plain, st.lists(plain, min_size=1, max_size=4, unique_by=repr))


@given(st.dictionaries(st.sampled_from("abcd"), values))
def test_calls_are_the_product_of_all_lists(arguments):
    lists = [each if isinstance(each, list) else [each] for each in arguments.values()]
    expected = [dict(zip(arguments, row, strict=True)) for row in product(*lists)]
    assert list(calls(arguments)) == expected
    assert count(arguments) == len(expected)


@given(st.integers(-50, 50), st.integers(0, 60))
def test_a_range_includes_both_ends(first, length):
    assert values_of(f"{first}..{first + length}") == list(range(first, first + length + 1))


@pytest.mark.parametrize("text", ["0.5", "a..b", "1..", "0...4", "1..2.5", "x"])
def test_other_texts_are_single_values(text):
    assert values_of(text) is None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "empty list"),
        ([1, 2, 1], "given twice"),
        ("4..1", "is empty"),
        ("0..99999999", "more than 1,000,000"),
        ([{"a": 1}, {"a": 1}], "given twice"),
    ],
)
def test_an_axis_that_cannot_be(value, problem):
    with pytest.raises(ValueError, match=problem):
        values_of(value)


def test_more_than_a_million_calls_are_refused():
    with pytest.raises(ValueError, match="1,002,001 calls"):
        next(calls({"a": "0..1000", "b": "0..1000"}))


def test_true_and_one_are_two_values():
    assert values_of([1, True, "1"]) == [1, True, "1"]


def anything(**settings): ...
def positional(a, /, b=1): ...
def usual(a, b=1, *, c): ...


@pytest.mark.parametrize(
    ("function", "names", "problem"),
    [
        (usual, ["a"], "no value for the argument c; give c=VALUE"),
        (usual, [], "no value for the arguments a, c"),
        (usual, ["a", "c", "bb"], "no argument 'bb'; did you mean b\\? \\(it has: a, b, c\\)"),
        (usual, ["a", "c", "worker"], "the name of a column"),
        (positional, ["b"], "'a' is positional-only"),
        (lambda: 1, ["x"], "it has none"),
    ],
)
def test_arguments_that_a_function_does_not_accept(function, names, problem):
    with pytest.raises(ConfigError, match=problem):
        check_signature(function, names, "here", ("worker",))


def test_arguments_that_a_function_accepts():
    check_signature(usual, ["a", "c"], "here", ())
    check_signature(anything, ["x", "y"], "here", ())
    check_signature(max, ["x"], "here", ())  # written in C: its call will tell
    assert keywords(usual) == ["a", "b", "c"]
    assert keywords(anything) is None
