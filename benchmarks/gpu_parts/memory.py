"""Predicted memory and speed next to measured ones, and real out-of-memory errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu_parts.bench import Bench, Row, Trained, ratio
from raypipe import faults

#: samples per step of which a prediction takes as much at once as fits; more than fits on any card
_MANY = 4096
_ACCUMULATION = 2


def out_of_memory(bench: Bench) -> Iterator[Row]:
    """Yield a row per micro-batch of the language model at the limit of the card's memory.

    The largest one that is predicted to fit must train. The first one that is predicted to need
    more than the whole card runs out of memory, and the training continues with less.
    """
    predicted = bench.predict(
        "lm_pretrain", {"training.effective_batch": _MANY, "training.compile": False}
    )
    both = list(dict.fromkeys((bench.precision("lm_pretrain"), "fp32")))
    for precision in bench.pick(both, both[:1]):
        prediction = predicted[precision]
        about = {
            "precision": precision,
            "capacity_bytes": prediction["capacity_bytes"],
        }
        if prediction["micro_batch"] is None:
            error = f"{precision}: {prediction['note']}"
            peak = prediction["peak_bytes"]  # at micro-batch 1
            yield {**about, "predicted_peak_bytes": peak, "as_predicted": None, "error": error}
            continue
        sizes = {"fits": prediction["micro_batch"], "runs out": first_too_large(prediction)}
        for expected, size in sizes.items():
            done = _at(bench, precision, size, sizes["runs out"])
            ran_out = any(row["kind"] == "out_of_memory" for row in done.failures)
            found = "runs out" if ran_out else "fits" if done.error is None else "fails"
            yield {
                **about,
                "micro_batch": size,
                "expected": expected,
                "found": found,
                "as_predicted": found == expected,
                "predicted_peak_bytes": peak_at(prediction, size),
                **done.columns("status", "attempts", "gpu_peak_bytes"),
                "micro_batch_at_end": done.trial.get("micro_batch"),
                "checkpointing_at_end": done.trial.get("gradient_checkpointing"),
            }


def peak_at(prediction: Row, size: int) -> int:
    """Return the bytes that torch reserves at a micro-batch, on the line through a prediction."""
    fixed = sum(prediction[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer"))
    slope = (prediction["peak_bytes"] - fixed) / prediction["micro_batch"]
    return int(fixed + slope * size)


def first_too_large(prediction: Row) -> int:
    """Return the smallest micro-batch that is predicted to need more than the whole card."""
    room = prediction["capacity_bytes"] - prediction["context_bytes"]
    size = int(prediction["micro_batch"])
    while peak_at(prediction, size) <= room:
        size += 1
    return size


def _at(bench: Bench, precision: str, size: int, too_large: int) -> Trained:
    """Train some steps at a micro-batch; a rehearsal runs out of memory on purpose."""
    given = {
        "training.effective_batch": _ACCUMULATION * size,
        "training.micro_batch": size,
        "training.precision": precision,
        "training.compile": False,
        "training.steps": bench.pick(4, 2),
        "training.log_every": 1,
        "training.warmup_steps": 1,
    }
    with fault(f"oom:micro_batch>{too_large - 1}" if bench.machine.rehearsal else None):
        return bench.train("lm_pretrain", f"{precision}-{size}", given)


@contextmanager
def fault(text: str | None) -> Iterator[None]:
    """Inject a fault into the trainings of the body."""
    if text is None:
        yield
        return
    os.environ[faults.VARIABLE] = text
    try:
        yield
    finally:
        del os.environ[faults.VARIABLE]


def predictions(bench: Bench) -> Iterator[Row]:
    """Yield a row per workload: memory and speed predicted before, and measured.

    The last row is the prediction of the transformer after the measurement has calibrated it.
    """
    shutil.rmtree(bench.cache / "cards", ignore_errors=True)  # calibrated by an earlier try
    small = ("lm_pretrain", "transformer")
    names = ("lm_pretrain", "summarization", "teleclass", "pabbo_lda", "transformer")
    for name in bench.pick(names, small):
        given: dict[str, Any] = {"training.precision": bench.precision(name)}
        given |= bench.pick({}, {"training.effective_batch": 8})
        prediction = bench.predict(name, given)[bench.precision(name)]
        if prediction["micro_batch"] is None:
            yield {"workload": name, **_predicted(prediction), "error": prediction["note"]}
            continue
        given |= {
            "training.micro_batch": prediction["micro_batch"],
            "training.accumulation": prediction["accumulation"],
            "training.effective_batch": prediction["effective_batch"],
            "training.steps": bench.pick(24, 4),
            "training.log_every": bench.pick(4, 1),
            "training.warmup_steps": 1,
        }
        done = bench.train(name, name, given)
        yield {"workload": name, **compared(prediction, done)}
        if name == "transformer" and done.error is None and not bench.machine.rehearsal:
            again = bench.predict(name, given, done.run_dir)[bench.precision(name)]
            yield {"workload": f"{name}, calibrated", **compared(again, done)}


def compared(prediction: Row, done: Trained) -> Row:
    """Return the columns of a prediction, of its measurement, and of their quotients."""
    trial = done.trial
    speed = trial.get("samples_per_s")
    within = None
    if speed is not None:
        within = prediction["samples_per_s_low"] <= speed <= prediction["samples_per_s_high"]
    return {
        **_predicted(prediction),
        **done.columns("status", "gpu_peak_bytes", "step_time_s", "samples_per_s", "mfu"),
        "peak_ratio": ratio(trial.get("gpu_peak_bytes"), prediction["peak_bytes"]),
        "speed_ratio": ratio(speed, prediction["samples_per_s"]),
        "speed_within_interval": within,
    }


def _predicted(prediction: Row) -> Row:
    same = ("precision", "compile", "micro_batch", "accumulation", "effective_batch")
    named: Mapping[str, Any] = {
        f"predicted_{name}": prediction.get(name)
        for name in ("peak_bytes", "step_time_s", "samples_per_s", "mfu")
    }
    interval = ("samples_per_s_low", "samples_per_s_high")
    return {
        **{name: prediction[name] for name in same if name in prediction},
        **named,
        **{f"predicted_{name}": prediction.get(name) for name in interval},
        "measurements": prediction["measurements"],
    }
