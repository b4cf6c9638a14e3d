"""The recommendation of a sweep, its reason and its snippet; the largest micro-batch of `fit`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raypipe.config.yaml_text import load_yaml
from raypipe.study.largest_batch import leaves_margin, next_size
from raypipe.study.recommendation import peak_bytes, recommend, snippet
from tests.scenario import cases

GIB = 2**30
TRIED = {
    (32, 400): [1, 2, 4, 8, 16, 32, 64, 48, 40, 36, 34],
    (1000, 5000): [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 768, 896, 960, 992],
}


def trial(name: str, value: float | None, *, micro: int = 8, **given: Any) -> dict[str, Any]:
    """A trial of a point that sets the micro-batch and the precision, and the seed if given."""
    seed = given.pop("seed", None)
    precision = given.get("precision", "bf16")
    point = {"t.training.micro_batch": micro, "t.training.precision": precision}
    return {
        **{"trial_id": f"sweep/t/{name}", "status": "succeeded", "trained_stage": "t"},
        "point": point | ({} if seed is None else {"t.training.seed": seed}),
        **{"micro_batch": micro, "accumulation": 128 // micro, "effective_batch": 128},
        **{"precision": precision, "gradient_checkpointing": False, "compile": False},
        **{"device": "NVIDIA H100", "samples_per_s": value, "gpu_peak_bytes": 2 * micro * GIB},
        **{"parity": None},
    } | given


@pytest.mark.parametrize("case", cases(__file__, "recommendations"), ids=lambda case: case["is"])
def test_what_is_recommended_and_why(case: dict[str, Any]) -> None:
    rows = [trial(name, value, **dict(*more)) for name, value, *more in case["rows"]]
    for swept in (rows, rows[::-1]):
        found = recommend(swept, case.get("metric", "samples_per_s"), case.get("mode", "max"))
        assert isinstance(found, str) == ("gives" not in case)
        text = found if isinstance(found, str) else found.reason
        assert [each for each in case.get("says", ()) if each not in text] == []
        assert "lacks" not in case or case["lacks"] not in text
        if not isinstance(found, str):
            given = found._asdict() | {"trial": found.trial["trial_id"].removeprefix("sweep/t/")}
            assert {name: given[name] for name in case["gives"]} == case["gives"]


@given(st.lists(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), max_size=3))
def test_a_snippet_is_what_a_configuration_has(value) -> None:
    settings = {"train.training.betas": value, "train.scaling.strategy": "fsdp", "o.betas": value}
    text = snippet(settings, "The best of 12 points.\nIt is " + "very " * 20 + "fast.")
    assert load_yaml(text, "snippet") == {
        "train": {"training": {"betas": value}, "scaling": {"strategy": "fsdp"}},
        "o": {"betas": value},
    }
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert len(comments) == 2
    assert max(map(len, comments)) <= 70
    assert snippet({}, "") == "{}\n"


def test_the_peak_is_that_of_the_gpu_or_on_a_cpu_of_the_host() -> None:
    row = {"device": "NVIDIA H100", "host_peak_bytes": 7}
    found = [peak_bytes({**row, "gpu_peak_bytes": peak}) for peak in (10.0, None, 0, math.nan)]
    assert found == [10, None, None, None]
    assert peak_bytes({**row, "device": "cpu"}) == 7


@example(limit=32, most=400)
@example(limit=1000, most=5000)
@given(limit=st.integers(0, 5000), most=st.integers(1, 5000))
def test_fit_finds_the_largest_that_fits(limit: int, most: int) -> None:
    tried: list[int] = []
    best, too_large = 0, None
    while (size := next_size(best, too_large, most)) is not None:
        tried.append(size)
        best, too_large = (size, too_large) if size <= limit else (best, size)
    assert len(set(tried)) == len(tried) <= 2 * math.log2(max(most, 2)) + 6
    assert all(1 <= size <= most for size in tried)
    assert best == most if limit >= most else limit - max(1, limit / 16) <= best <= limit
    assert (best == 0) == (limit == 0)
    assert tried == TRIED.get((limit, most), tried)


@pytest.mark.parametrize(
    ("own", "of_all", "fits"), [(9.0, 0, True), (9.6, 0, False), (9.0, 9.4, True), (9.0, 10, False)]
)
def test_the_margin_is_left_free_beside_what_others_hold(own, of_all, fits) -> None:
    """Others are the context, buffers of NCCL and other processes."""
    row = {"gpu_peak_bytes": own * GIB, "gpu_memory_used_peak_bytes": of_all * GIB}
    assert leaves_margin(row, 10 * GIB) == fits
    assert leaves_margin(row, math.inf)
