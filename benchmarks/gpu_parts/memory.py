"""Predicted memory and speed next to measured ones, and real out-of-memory errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.gpu_parts.bench import Bench, Row, Trained, ratio
from raypipe import faults

#: the medium language model takes more than this per sample, so that no card holds more samples
_LEAST_BYTES = 2**29
#: share of the card's whole memory that a training is predicted to need which must run out of it;
#: predictions were 0.5 % too high
_TOO_MUCH = 1.05


def out_of_memory(bench: Bench) -> None:
    """Measure the language model at the limit of the card's memory, a row per micro-batch.

    The largest one that is predicted to fit must train. One that is predicted to need 5 % more than
    the whole card must run out of memory, and continue with less and the same effective batch.
    """
    (fits,) = bench.measure("fits", lambda: _fits(bench))
    if (prediction := fits.get("prediction")) is None or prediction["micro_batch"] is None:
        return
    size = too_large(prediction)
    bench.measure("runs out", lambda: _at(bench, prediction, size, "runs out"))


def _fits(bench: Bench) -> Row:
    """Return the prediction of the largest micro-batch, and what it does."""
    most = bench.pick(0, 0, 1024) or (bench.capacity_bytes or 0) // _LEAST_BYTES
    given = {"training.effective_batch": most, "training.compile": False}
    given["training.precision"] = bench.precision("lm_pretrain")
    prediction = bench.predict("lm_pretrain", given)
    if prediction["micro_batch"] is None:
        return {"precision": prediction["precision"], "error": prediction["note"]}
    row = _at(bench, prediction, prediction["micro_batch"], "fits")
    return {**row, "prediction": prediction}


def peak_at(prediction: Row, size: int) -> int:
    """Return the bytes that torch reserves at a micro-batch, on the line through a prediction."""
    fixed = sum(prediction[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer"))
    slope = (prediction["peak_bytes"] - fixed) / prediction["micro_batch"]
    return int(fixed + slope * size)


def too_large(prediction: Row) -> int:
    """Return a micro-batch that is predicted to need 5 % more than the whole card.

    It is the smallest multiple of four: halves of it have equal micro-batches, too.
    """
    room = _TOO_MUCH * prediction["capacity_bytes"] - prediction["context_bytes"]
    size = 4
    while peak_at(prediction, size) <= room:
        size += 4
    return size


def _at(bench: Bench, prediction: Row, size: int, expected: str) -> Row:
    """Train two steps at a micro-batch; a rehearsal runs out of memory on purpose.

    The memory is that of the second step, for which the optimizer has its state.
    """
    given = {
        "training.effective_batch": size,
        "training.micro_batch": size,
        "training.precision": prediction["precision"],
        "training.compile": False,
        "training.steps": 2,
        "training.log_every": 1,
        "training.warmup_steps": 1,
    }
    limit = f"oom:micro_batch>{too_large(prediction) - 1}"
    with fault(limit if bench.machine.rehearsal else None):
        done = bench.train("lm_pretrain", f"micro-batch-{size}", given)
    ran_out = any(row["kind"] == "out_of_memory" for row in done.failures)
    found = "runs out" if ran_out else "fits" if done.error is None else "fails"
    return {
        "precision": prediction["precision"],
        "micro_batch": size,
        "expected": expected,
        "found": found,
        "as_predicted": found == expected,
        "predicted_peak_bytes": peak_at(prediction, size),
        **done.columns("status", "attempts", "gpu_peak_bytes"),
        **{f"{name}_at_end": done.trial.get(name) for name in ("micro_batch", "accumulation")},
        "checkpointing_at_end": done.trial.get("gradient_checkpointing"),
    }


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


def predictions(bench: Bench) -> None:
    """Predict and measure memory and speed, a row per workload."""
    small = ("lm_pretrain", "transformer")
    names = ("lm_pretrain", "summarization", "teleclass", "pabbo_lda", "transformer")
    for name in bench.pick(names, small, small):
        bench.measure(name, partial(_predicted_and_measured, bench, name))


def _predicted_and_measured(bench: Bench, name: str) -> list[Row]:
    given: dict[str, Any] = {"training.precision": bench.precision(name)}
    given |= bench.pick({}, {"training.compile": False}, {"training.effective_batch": 8})
    prediction = bench.predict(name, given)
    if prediction["micro_batch"] is None:
        return [{"workload": name, **_predicted(prediction), "error": prediction["note"]}]
    given |= {
        "training.micro_batch": prediction["micro_batch"],
        "training.accumulation": prediction["accumulation"],
        "training.effective_batch": prediction["effective_batch"],
        "training.steps": bench.pick(24, 10, 4),
        "training.log_every": bench.pick(4, 2, 1),
        "training.warmup_steps": 1,
    }
    done = bench.train(name, name, given)
    return [{"workload": name, **compared(prediction, done)}]


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
    }
