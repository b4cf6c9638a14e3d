"""The recommendation of a sweep, its reason and its snippet; the largest micro-batch of `fit`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raypipe.commands.run import points_table
from raypipe.config.yaml_text import load_yaml
from raypipe.study.largest_batch import leaves_margin, next_size
from raypipe.study.recommendation import Recommendation, peak_bytes, recommend, snippet

GIB = 2**30
Row = dict[str, Any]


def trial(name: str, value: float | None, *, micro: int = 8, **given: Any) -> Row:
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


def recommended(rows: list[Row], mode: Any = "max", **given: Any) -> Recommendation:
    found = recommend(rows, given.pop("metric", "samples_per_s"), mode, **given)
    assert isinstance(found, Recommendation)
    return found


def test_the_best_with_its_reason() -> None:
    rows = [
        trial("a", 1650.4, precision="fp32", micro=4),
        trial("b", 2330.0, precision="fp32", micro=8),
        trial("c", 5120.0, micro=16),
        trial("d", None, micro=32, status="out_of_memory"),
        trial("e", None, micro=64, status="skipped"),
        trial("f", None, micro=128, status="skipped"),
    ]
    found = recommended(rows)
    assert (found.trial["trial_id"], found.value) == ("sweep/t/c", 5120.0)
    assert found.reason == (
        "The best of 3 points: 5120 samples/s.\nOf 6 trials 1 out of memory, 2 skipped."
    )
    assert found.settings == {"t.training.micro_batch": 16, "t.training.precision": "bf16"}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "no point succeeded"),
        ([trial("a", 5.0, status="interrupted")], "no point succeeded"),
        ([trial("a", math.nan), trial("b", None), trial("c", math.inf)], "no point has a finite"),
        ([trial("a", 5.0, parity=0.5)], "the loss differs from fp32's by more than 2 %"),
        # one seed that changes the loss rejects the point
        ([trial("a", 9.0, seed=0), trial("b", 9.0, seed=1, parity=0.1)], "the loss differs"),
    ],
)
def test_why_nothing_is_recommended(rows: list[Row], why: str) -> None:
    assert why in str(recommend(rows, "samples_per_s", "max"))


def measured(speeds: dict[str, list[float]]) -> Recommendation:
    """The recommendation of points by precision, each with the speeds of its measurements."""
    rows = []
    for precision, values in speeds.items():
        for number, value in enumerate(values):
            repeats = f"sweep/t/{precision}-0" if number else None
            rows.append(trial(f"{precision}-{number}", value, precision=precision, repeats=repeats))
    return recommended(rows)


def test_the_median_of_the_measurements_decides_and_of_a_tie_the_simpler_setting() -> None:
    found = measured({"fp32": [50.0, 60.0, 10.0], "bf16": [99.0, 70.0, 80.0]})
    assert (found.trial["trial_id"], found.low, found.high) == ("sweep/t/bf16-0", 70.0, 99.0)
    assert "The best of 2 points: 80 samples/s (median of 3, 70 to 99)." in found.reason
    found = measured({"fp32": [50.0, 60.0, 72.0], "bf16": [99.0, 70.0, 80.0], "fp16": [8.0] * 3})
    assert (found.trial["trial_id"], found.value) == ("sweep/t/fp32-0", 60.0)
    assert found.reason == (
        "The simplest of 2 points that are tied for the best of 3, as their ranges overlap "
        "(micro_batch=8 precision=bf16 80 samples/s, micro_batch=8 precision=fp32 60 samples/s): "
        "60 samples/s (median of 3, 50 to 72)."
    )


@given(st.permutations(range(6)))
def test_seeds_are_averaged(order) -> None:
    rows = [
        trial("a", 10.0, seed=0, gpu_peak_bytes=3 * GIB),
        trial("b", 13.0, seed=1, gpu_peak_bytes=5 * GIB),
        trial("c", 16.0, seed=2, gpu_peak_bytes=4 * GIB),
        trial("d", 5.0, seed=0, micro=16),
        trial("e", 2.0, seed=1, micro=16),
        trial("f", None, seed=2, micro=16, status="failed"),
    ]
    found = recommended([rows[number] for number in order])
    assert (found.trial["trial_id"], found.value) == ("sweep/t/b", 13.0)
    assert "t.training.seed" not in found.settings
    assert found.reason == (
        "The best of 2 points: 13 samples/s (mean of 3 seeds, 10 to 16).\nOf 6 trials 1 failed."
    )
    assert "(mean of 2 of 3 seeds, 2 to 5)" in recommended(rows[3:]).reason


def test_other_batches_and_rejections_are_said() -> None:
    rows = [trial("a", 9.0, eval_accuracy=0.5), trial("b", 9.0, micro=16, eval_accuracy=0.9)]
    rows[1]["effective_batch"] = 256
    caution = "points differ in the effective batch"
    assert caution in recommended(rows, metric="eval_accuracy").reason
    for row in rows:
        row["point"] = row["point"] | {"t.training.effective_batch": row["effective_batch"]}
    assert caution not in recommended(rows, metric="eval_accuracy").reason
    rows = [
        trial("a", 100.0, micro=16, parity=0.019),
        trial("b", 300.0, micro=16, precision="fp16", parity=0.12),
        trial("c", 200.0, micro=32, precision="fp16", parity=math.nan),
        trial("d", 50.0, parity=0.5),
    ]
    found = recommended(rows)
    assert found.trial["trial_id"] == "sweep/t/a"
    assert "2 better rejected, as the loss differs from fp32's by more than 2 %" in found.reason
    # of a training whose settings changed, none of them is recommended
    rows = [trial("a", 1.0, seed=0), trial("b", 9.0, seed=0, settings_history="[]")]
    rows[1]["point"]["t.training.precision"] = None
    found = recommended(rows)
    assert "t.training.precision" not in found.settings
    assert "no single value has led to its model, sweep/t/b" in found.reason


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.sampled_from([None, 0.1])), max_size=8),
    st.sampled_from(["max", "min"]),
)
def test_without_ties_the_winner_has_the_best_value(found, mode) -> None:
    rows = [
        trial(f"{number}", value, micro=2**number, parity=parity)
        for number, (value, parity) in enumerate(found)
    ]
    chosen = recommend(rows, "samples_per_s", mode)
    accepted = [row["samples_per_s"] for row in rows if row["parity"] is None]
    assert isinstance(chosen, str) == (not accepted)
    if not isinstance(chosen, str):
        assert chosen.value == (max if mode == "max" else min)(accepted)
        assert chosen == recommend(rows[::-1], "samples_per_s", mode)


def test_the_terminal_shows_the_points_as_a_table() -> None:
    rows = [trial("a", 50.123456, micro=2), trial("b", None, micro=4, status="out_of_memory")]
    rows += [trial("c", 99.0)]
    assert points_table(rows, "samples_per_s", "max").split("\n") == [
        "point                         samples_per_s  status",
        "micro_batch=8 precision=bf16             99  succeeded",
        "micro_batch=2 precision=bf16        50.1235  succeeded",
        "micro_batch=4 precision=bf16                 out_of_memory",
    ]
    many = [trial(f"{n}", float(n), micro=n) for n in range(1, 21)]
    assert points_table(many, "samples_per_s", "min").endswith("and 15 more in the table trials")


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
    assert max(map(len, comments)) <= 88
    assert snippet({}, "") == "{}\n"


def test_the_peak_is_that_of_the_gpu_or_on_a_cpu_of_the_host() -> None:
    row = {"device": "NVIDIA H100", "host_peak_bytes": 7}
    found = [peak_bytes({**row, "gpu_peak_bytes": peak}) for peak in (10.0, None, 0, math.nan)]
    assert found == [10, None, None, None]
    assert peak_bytes({**row, "device": "cpu"}) == 7


@example(limit=5, most=16)
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
    if (limit, most) == (5, 16):
        assert tried == [1, 2, 4, 8, 6, 5]


@pytest.mark.parametrize(
    ("peak", "others", "fits"),
    [(9.0, None, True), (9.6, None, False), (9.0, 0.4, True), (9.0, 1.0, False)],
)
def test_the_margin_is_left_free_beside_what_others_hold(
    peak: float, others: float | None, fits: bool
) -> None:
    row = {"device": "card", "gpu_peak_bytes": peak * GIB}
    if others is not None:  # context, NCCL buffers and other processes
        row["gpu_memory_used_peak_bytes"] = (peak + others) * GIB
    assert leaves_margin(row, 10 * GIB) == fits
    assert leaves_margin(row, None)
