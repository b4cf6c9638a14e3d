from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raypipe.commands.recommendation import points_table
from raypipe.config.yaml_text import load_yaml
from raypipe.study.recommendation import Recommendation, nothing, recommend, snippet

GIB = 2**30
ONCE = "Mind that each point was measured once, which does not tell them apart (sweep.repeats)."
Row = dict[str, Any]


def trial(name: str, value: float | None, *, micro: int = 8, **given: Any) -> Row:
    """A trial of a point that sets the micro-batch and the precision, and the seed if given."""
    seed = given.pop("seed", None)
    precision = given.get("precision", "bf16")
    point = {"t.training.micro_batch": micro, "t.training.precision": precision}
    return {
        "trial_id": f"sweep/t/{name}",
        "status": "succeeded",
        "trained_stage": "t",
        "point": point | ({} if seed is None else {"t.training.seed": seed}),
        "micro_batch": micro,
        "accumulation": 128 // micro,
        "effective_batch": 128,
        "precision": precision,
        "gradient_checkpointing": False,
        "compile": False,
        "device": "NVIDIA H100",
        "samples_per_s": value,
        "gpu_peak_bytes": 2 * micro * GIB,
        "energy_j_per_sample": 1.0,
        "parity": None,
        "reference": False,
    } | given


def best(rows: list[Row], mode: Any = "max", **given: Any) -> Recommendation:
    found = recommend(rows, "samples_per_s", mode, 0.02, **given)
    assert found is not None
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
    found = best(rows, capacity_bytes=80 * GIB)
    assert (found.trial_id, found.value) == ("sweep/t/c", 5120.0)
    assert found.reason == (
        "The fastest of 3 points: 5,120 samples/s, 3.1 times the slowest (1,650 samples/s), "
        "2.2 times the best in plain fp32 (2,330 samples/s). "
        "Peak memory 32.0 GiB of 80.0 GiB; of 6 trials 1 ran out of memory, 2 were skipped. " + ONCE
    )


def test_less_can_be_better() -> None:
    rows = [trial("a", None, loss=2.5), trial("b", None, micro=16, loss=2.0)]
    found = recommend(rows, "loss", "min", 0.02)
    assert found is not None
    assert found.trial_id == "sweep/t/b"
    assert found.reason == (
        "The best of 2 points: loss 2, 0.8 times the worst (loss 2.5). Peak memory 32.0 GiB."
    )


def test_the_sizes_of_the_batch_go_together() -> None:
    found = best([trial("a", 1.0)])
    assert found.settings == {
        "t.training.micro_batch": 8,
        "t.training.precision": "bf16",
        "t.training.accumulation": 16,
        "t.training.effective_batch": 128,
    }
    row = trial("a", 1.0) | {"point": {"t.training.learning_rate": 0.1}}
    assert best([row]).settings == {"t.training.learning_rate": 0.1}
    row["point"] = {"t.training.seed": 3}
    assert best([row]).settings == {}


def test_nothing_to_recommend() -> None:
    assert recommend([], "samples_per_s", "max", 0.02) is None
    rows = [
        trial("a", None),
        trial("b", math.nan),
        trial("c", math.inf),
        trial("d", 5.0, status="interrupted"),
        trial("e", 5.0, reference=True),
        trial("f", 5.0, parity=0.5),
    ]
    assert recommend(rows, "samples_per_s", "max", 0.02) is None
    with pytest.raises(ValueError, match="mode = 'up'"):
        recommend(rows, "samples_per_s", "up", 0.02)  # type: ignore[arg-type]


def test_why_nothing_is_recommended() -> None:
    metric = "samples_per_s"
    assert nothing([trial("a", 5.0, reference=True)], metric, 0.02) == "no point succeeded"
    assert nothing([trial("a", math.nan)], metric, 0.02) == f"no point has a finite {metric}"
    assert nothing([trial("a", 5.0, parity=0.5)], metric, 0.02) == (
        "every loss differs from fp32's by more than 2 %"
    )


def measured(speeds: dict[str, list[float]]) -> Recommendation:
    """The recommendation of points by precision, each with the speeds of its measurements."""
    rows = []
    for precision, values in speeds.items():
        for number, value in enumerate(values):
            repeats = f"sweep/t/{precision}-0" if number else None
            rows.append(trial(f"{precision}-{number}", value, precision=precision, repeats=repeats))
    return best(rows)


def test_the_median_of_the_measurements_decides() -> None:
    found = measured({"fp32": [50.0, 60.0, 10.0], "bf16": [99.0, 70.0, 80.0]})
    assert (found.trial_id, found.value, found.low, found.high) == (
        "sweep/t/bf16-0", 80.0, 70.0, 99.0
    )  # fmt: skip
    assert found.reason == (
        "The fastest of 2 points: 80 samples/s (median of 3, 70 to 99), 1.6 times plain fp32, the "
        "slowest (50 samples/s). Peak memory 16.0 GiB."
    )


def test_of_a_tie_the_simpler_setting_is_recommended() -> None:
    found = measured({"fp32": [50.0, 60.0, 72.0], "bf16": [99.0, 70.0, 80.0], "fp16": [8.0] * 3})
    assert (found.trial_id, found.value) == ("sweep/t/fp32-0", 60.0)
    assert found.reason == (
        "2 of 3 points are tied for the fastest, as their ranges overlap: micro_batch=8 "
        "precision=bf16 80 samples/s, micro_batch=8 precision=fp32 60 samples/s. Recommended is "
        "the simplest of them: 60 samples/s (median of 3, 50 to 72), 7.5 times the slowest "
        "(8 samples/s). Peak memory 16.0 GiB."
    )
    assert found.best["t.training.precision"] == "bf16"


def test_points_of_other_effective_batches_are_other_trainings() -> None:
    rows = [trial("a", 9.0, eval_accuracy=0.5), trial("b", 9.0, micro=16, eval_accuracy=0.9)]
    rows[1]["effective_batch"] = 256
    found = recommend(rows, "eval_accuracy", "max", 0.02)
    assert found is not None
    assert "the points differ in the effective batch" in found.reason
    for row in rows:
        row["point"] = row["point"] | {"t.training.effective_batch": row["effective_batch"]}
    found = recommend(rows, "eval_accuracy", "max", 0.02)
    assert found is not None
    assert "differ in the effective batch" not in found.reason


def test_the_terminal_shows_the_points_as_a_table() -> None:
    rows = [trial("a", 50.123456, micro=2), trial("b", None, micro=4, status="out_of_memory")]
    rows += [trial("c", 99.0), trial("d", 5.0, reference=True)]
    assert points_table(rows, "samples_per_s", "max").split("\n") == [
        "micro_batch  precision  samples_per_s  status",
        "8            bf16                  99  succeeded",
        "2            bf16             50.1235  succeeded",
        "4            bf16                      out_of_memory",
    ]
    many = [trial(f"{n}", float(n), micro=n) for n in range(1, 21)]
    assert points_table(many, "samples_per_s", "min").endswith(
        "\n... and 8 more in the table trials"
    )


def test_a_single_point() -> None:
    assert best([trial("a", 12.0, gpu_peak_bytes=0)]).reason == (
        "The only point to choose from: 12 samples/s."
    )


def test_ties_go_to_the_lower_memory() -> None:
    rows = [trial("a", 99.0, micro=16), trial("b", 98.0, micro=8), trial("c", 97.5, micro=4)]
    rows += [trial("d", 50.0, micro=1)]
    rows[2]["samples_per_s"] = 97.0  # just outside 2 % of the best
    found = best(rows)
    assert found.trial_id == "sweep/t/b"
    assert found.reason.startswith(
        "Of 4 points 2 are within 2 % of the fastest, and this is the one with the least memory: "
        "98 samples/s, 1.96 times the slowest (50 samples/s)."
    )


def test_then_to_the_lower_energy() -> None:
    rows = [
        trial("a", 99.0, micro=16, energy_j_per_sample=2.0),
        trial("b", 98.9, micro=8, energy_j_per_sample=3.0),
        trial("c", 98.0, micro=8, precision="fp16", energy_j_per_sample=2.5),
    ]
    found = best(rows)
    assert found.trial_id == "sweep/t/c"
    assert "the one with the least memory and energy: " in found.reason
    for row in rows:
        row["gpu_peak_bytes"] = None
    found = best(rows)
    assert found.trial_id == "sweep/t/a"
    assert "the one with the least energy: " in found.reason


@given(st.permutations(range(4)))
def test_equal_points_are_told_apart_by_their_names(order) -> None:
    rows = [trial("abcd"[number], 5.0, micro=2**number, gpu_peak_bytes=GIB) for number in order]
    found = best(rows)
    assert found.trial_id == "sweep/t/a"
    assert found.reason == (
        "The fastest of 4 points (3 more within 2 %): 5 samples/s. Peak memory 1.0 GiB. " + ONCE
    )


@given(st.permutations(range(6)))
def test_seeds_are_averaged(order) -> None:
    rows = [
        trial("a", 10.0, seed=0, gpu_peak_bytes=3 * GIB),
        trial("b", 13.0, seed=1, gpu_peak_bytes=5 * GIB),
        trial("c", 16.0, seed=2, gpu_peak_bytes=4 * GIB),
        trial("d", 20.0, seed=0, micro=16),
        trial("e", 2.0, seed=1, micro=16),
        trial("f", None, seed=2, micro=16, status="failed"),
    ]
    found = best([rows[number] for number in order])
    assert (found.trial_id, found.value) == ("sweep/t/b", 13.0)
    assert "t.training.seed" not in found.settings
    assert found.reason == (
        "The fastest of 2 points: 13 samples/s (mean of 3 seeds, 10 to "
        "16), 1.18 times the slowest (11 samples/s). "
        "Peak memory 5.0 GiB; of 6 trials 1 failed. " + ONCE
    )
    found = best(rows[3:])
    assert "(mean of 2 of 3 seeds, 2 to 20)" in found.reason
    assert "2 samples/s (1 of 2 seeds)" in best(rows[4:]).reason


def test_what_changes_the_loss_is_rejected() -> None:
    rows = [
        trial("a", 100.0, micro=16, parity=0.019),
        trial("b", 300.0, micro=16, precision="fp16", parity=0.12),
        trial("c", 200.0, micro=32, precision="fp16", parity=math.nan),
        trial("d", 50.0, parity=0.5),
    ]
    found = best(rows)
    assert found.trial_id == "sweep/t/a"
    assert found.reason.endswith(
        " 2 faster ones, the best with precision fp16 (300 samples/s), are not recommended: "
        "the loss differs from fp32's by 12 %, and 2 % are allowed."
    )
    del rows[1]
    assert best(rows).reason.endswith(
        " A faster one with micro_batch 32, precision fp16 (200 samples/s) is not recommended: "
        "the loss differs from fp32's beyond measure, and 2 % are allowed."
    )


def test_one_seed_that_changes_the_loss_rejects_the_point() -> None:
    rows = [trial("a", 9.0, seed=0), trial("b", 9.0, seed=1, parity=0.1)]
    assert recommend(rows, "samples_per_s", "max", 0.02) is None


def test_a_reference_is_compared_with_but_never_recommended() -> None:
    rows = [
        trial("a", 10.0),
        trial("b", 20.0, precision="fp32", reference=True),
        trial("c", 4.0, precision="fp32", micro=4, gradient_checkpointing=True),
    ]
    found = best(rows)
    assert found.trial_id == "sweep/t/a"
    assert "0.5 times the best in plain fp32 (20 samples/s)" in found.reason
    slowest = trial("d", 2.5, precision="fp32", micro=2)
    assert ", 4 times plain fp32, the slowest (2.5 samples/s)." in best([rows[0], slowest]).reason
    assert "plain" not in best([slowest, rows[1]]).reason  # the winner is plain itself


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4), st.floats(-100, 100), st.integers(1, 5), st.sampled_from([None, 0.1])
        ),
        max_size=8,
    ),
    st.sampled_from(["max", "min"]),
)
def test_the_winner_is_within_the_tolerances(found, mode) -> None:
    rows = [
        trial(f"{number}", value, micro=2**number, gpu_peak_bytes=peak * GIB, parity=parity)
        for number, (_, value, peak, parity) in enumerate(found)
    ]
    chosen = recommend(rows, "samples_per_s", mode, 0.02)
    accepted = [row for row in rows if row["parity"] is None]
    assert (chosen is None) == (not accepted)
    if chosen is None:
        return
    pick = max if mode == "max" else min
    top = pick(row["samples_per_s"] for row in accepted)
    assert abs(chosen.value - top) <= 0.02 * abs(top)
    (winner,) = (row for row in rows if row["trial_id"] == chosen.trial_id)
    close = [row for row in accepted if abs(row["samples_per_s"] - top) <= 0.02 * abs(top)]
    assert winner["gpu_peak_bytes"] == min(row["gpu_peak_bytes"] for row in close)
    assert chosen == recommend(rows[::-1], "samples_per_s", mode, 0.02)


names = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = plain | st.lists(plain, max_size=3)


@given(
    st.recursive(values, lambda inner: st.dictionaries(names, inner, min_size=1), max_leaves=8),
    st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn"])),
)
def test_a_snippet_reads_back_as_nested_settings(nested, comment) -> None:
    def dotted(value: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            key: leaf
            for name, part in value.items()
            for key, leaf in dotted(part, f"{prefix}.{name}" if prefix else name).items()
        }

    nested = nested if isinstance(nested, dict) else {"a": nested}
    text = snippet(dotted(nested, ""), comment)
    assert yaml.safe_load(text) == nested


def test_a_snippet_is_what_a_configuration_has() -> None:
    betas = [0.9, 0.95]
    settings = {
        "train.training.micro_batch": 16,
        "train.training.learning_rate": 1e-5,
        "train.training.betas": betas,
        "train.scaling.strategy": "fsdp",
        "other.betas": betas,
    }
    text = snippet(settings, "The fastest of 12 points.\nIt is " + "very " * 20 + "fast.")
    assert load_yaml(text, "snippet") == {
        "train": {
            "training": {"micro_batch": 16, "learning_rate": 1e-5, "betas": betas},
            "scaling": {"strategy": "fsdp"},
        },
        "other": {"betas": betas},
    }
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert len(comments) == 2
    assert max(map(len, comments)) <= 88
    assert "&" not in text
    assert snippet({}, "") == "{}\n"


@pytest.mark.parametrize("keys", [("a", "a.b"), ("a.b", "a"), ("a", "a.b.c")])
def test_a_key_with_a_value_and_parts_is_refused(keys) -> None:
    with pytest.raises(ValueError, match=keys[1]):
        snippet(dict.fromkeys(keys, 1), "")
