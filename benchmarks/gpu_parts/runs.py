"""Whole runs: two cards, TELEClass, T5, and a sweep through the command."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import raypipe as rp
from benchmarks.gpu_parts.bench import WORKLOADS, Bench, Row, message, ratio, rows_of
from benchmarks.gpu_parts.memory import fault

_SPEED = ("status", "samples_per_s", "step_time_s", "mfu", "gpu_peak_bytes", "loss_final")
#: bytes that CUDA and NCCL take in each process beyond what torch reserves, about
_OUTSIDE = 2**30


def two_cards(bench: Bench) -> Iterator[Row]:
    """Yield a row for one worker, DDP and FSDP over two, and for one card without memory."""
    micro = bench.pick(8, 2)
    common = bench.short("lm_pretrain", micro, *bench.pick((30, 5), (3, 1)))
    common["training.effective_batch"] = 4 * micro
    alone: Row = {}
    peak = 0
    cases = (("ddp", 1), ("ddp", 2), ("fsdp", 2))
    for strategy, workers in bench.pick(cases, cases[::2]):
        given = {**common, "scaling.strategy": strategy, "scaling.workers": workers}
        done = bench.train("lm_pretrain", f"{strategy}-{workers}", given, on_ray=workers > 1)
        trial = done.trial
        alone = alone or trial
        peak = max(peak, trial.get("gpu_peak_bytes") or 0) if strategy == "ddp" else peak
        yield {
            "case": f"{strategy}, {workers} worker(s)",
            **done.columns(*_SPEED, "attempts"),
            "speedup": ratio(trial.get("samples_per_s"), alone.get("samples_per_s")),
            "loss_quotient": ratio(trial.get("loss_final"), alone.get("loss_final")),
        }
    began = time.monotonic()
    text = f"oom:micro_batch>{micro - 1}" if bench.machine.rehearsal else None
    with fault(text), _little_room(_OUTSIDE + 3 * peak // 4 if text is None else None):
        given = {**common, "scaling.workers": 2}
        done = bench.train("lm_pretrain", "full", given, on_ray=True)
    yield {
        "case": "ddp, 2 workers, the second card is full",
        **done.columns(*_SPEED, "attempts"),
        "failures": ", ".join(dict.fromkeys(row["kind"] for row in done.failures)),
        "micro_batch_at_end": done.trial.get("micro_batch"),
        "duration_s": time.monotonic() - began,
    }


@contextmanager
def _little_room(room_bytes: int | None) -> Iterator[None]:
    """Fill the second card but for some bytes, from this process."""
    if room_bytes is None:
        yield
        return
    import torch

    free, _ = torch.cuda.mem_get_info(1)
    size = max(0, free - room_bytes)
    filling = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    try:
        yield
    finally:
        del filling
        torch.cuda.empty_cache()


def teleclass(bench: Bench) -> Iterator[Row]:
    """Yield a row per stage of TELEClass, and the speed of a classifier of BERT's size."""
    given = bench.overrides("teleclass", bench.pick({}, {"training.epochs": 1}))
    local = bool(bench.machine.rehearsal)
    error = None
    try:
        run = rp.run("teleclass", given, run_dir=bench.folder / "teleclass", local=local)
    except rp.RunFailedError as failed:
        run, error = failed.run, message(failed)
    trained = {row["stage"]: row for row in rows_of(run, "trials")}
    quality = {
        row["phase"]: row
        for row in rows_of(run, "measures")
        if row["documents_of"] == "test" and row["level"] == "all"
    }
    for row in rows_of(run, "stages"):
        name = row["stage"]
        shown = {key: row[key] for key in ("status", "duration_s", "gpu_peak_bytes")}
        yield {
            "case": name,
            **shown,
            "samples_per_s": trained.get(name, {}).get("samples_per_s"),
            "example_f1": quality.get(name, {}).get("example_f1"),
            "error": error if row["status"] == "failed" else None,
        }
    if not bench.machine.rehearsal:
        yield from _classifier()


def _classifier() -> Iterator[Row]:
    """Yield the speed and memory of a classifier of BERT's size, 512 tokens, 16 at once."""
    from benchmarks.teleclass import measure_classifier

    for row in measure_classifier([16], 10)["rows"]:
        yield {
            "case": f"BERT, {row['precision']}, {'training' if row['training'] else 'inference'}",
            "status": "out_of_memory" if row["peak_bytes"] is None else "succeeded",
            "samples_per_s": row["samples_per_s"],
            "gpu_peak_bytes": row["peak_bytes"],
        }


def t5(bench: Bench) -> Iterator[Row]:
    """Yield a row for a T5 of 220 M parameters, trained from scratch on docstrings."""
    given = {
        "training.precision": bench.precision("summarization"),
        "training.steps": bench.pick(200, 6),
        "training.log_every": bench.pick(20, 2),
    }
    given |= bench.pick({}, {"training.effective_batch": 8})
    done = bench.train("summarization", "t5", given)
    losses = [row["loss"] for row in done.steps]
    names = ("compile", "precision", "micro_batch", "parameters", "eval_cross_entropy")
    yield {
        **done.columns(*names, *_SPEED, "tokens_per_s", "energy_j_per_sample", "attempts"),
        "loss_first": losses[0] if losses else None,
    }


def sweep(bench: Bench) -> Iterator[Row]:
    """Yield a row per trial of ``raypipe sweep sweeps/transformer``."""
    run_dir = bench.folder / "sweep"
    compared = list(dict.fromkeys(("fp32", bench.precision("transformer"))))
    axes: dict[str, Any] = {
        "sweep.axes.training.micro_batch": bench.pick([8, 32, 128], [4, 8]),
        "sweep.axes.training.precision": bench.pick(compared, ["fp32"]),
        "sweep.axes.training.accumulation": [1],
        "sweep.rounds.seconds": bench.pick(30, 0),
    }
    small = WORKLOADS["transformer"].small if bench.machine.rehearsal else {}
    small = small and {**small, "sweep.steps": 2, "sweep.warmup_steps": 1}
    texts = [f"{key}={value}" for key, value in {**axes, **small}.items()]
    command = [sys.executable, "-m", "raypipe", "sweep", "sweeps/transformer", *texts]
    done = subprocess.run([*command, "--run-dir", str(run_dir)])
    if done.returncode == 2:
        yield {"status": "refused", "error": "exit status 2: the message is above"}
        return
    run = rp.open(run_dir)
    best = {row["trial_id"] for row in rows_of(run, "recommendations") if "trial_id" in row}
    names = (
        *("status", "micro_batch", "precision", "samples_per_s", "gpu_peak_bytes"),
        *("predicted_peak_bytes", "energy_j_per_sample", "mfu", "parity", "reason"),
    )
    for trial in rows_of(run, "trials"):
        yield {
            **{name: trial.get(name) for name in names},
            "recommended": trial["trial_id"] in best,
        }
