"""Whole runs: two cards, the quickstart's training, TELEClass, T5, and a sweep."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import raypipe as rp
from benchmarks.gpu_parts.bench import WORKLOADS, Bench, Row, message, ratio, rows_of
from benchmarks.gpu_parts.memory import fault

_SPEED = ("status", "samples_per_s", "step_time_s", "mfu", "gpu_peak_bytes", "loss_final")
#: bytes that CUDA and NCCL take in each process beyond what torch reserves, about
_OUTSIDE = 2**30


def two_cards(bench: Bench) -> None:
    """Measure one worker, DDP and FSDP over two, and one of two cards without memory."""
    micro = bench.pick(8, 8, 2)
    common = bench.short("lm_pretrain", micro, *bench.pick((30, 5), (15, 5), (3, 1)))
    common["training.effective_batch"] = 4 * micro
    cases = (("ddp", 1), ("ddp", 2), ("fsdp", 2))
    for strategy, workers in bench.pick(cases, cases, cases[::2]):
        given = {**common, "scaling.strategy": strategy, "scaling.workers": workers}
        label = f"{strategy}-{workers}"
        bench.measure(label, partial(_scaled, bench, label, workers, given))
    replicas = [*bench.stored("ddp-1"), *bench.stored("ddp-2")]
    peak = max(row.get("gpu_peak_bytes") or 0 for row in replicas)
    bench.measure("full", lambda: _full(bench, micro, common, peak))


def _scaled(bench: Bench, label: str, workers: int, given: Mapping[str, Any]) -> Row:
    done = bench.train("lm_pretrain", label, given, on_ray=workers > 1)
    alone = next(iter(bench.stored("ddp-1")), done.trial)
    return {
        "case": f"{given['scaling.strategy']}, {workers} worker(s)",
        **done.columns(*_SPEED, "attempts"),
        "speedup": ratio(done.trial.get("samples_per_s"), alone.get("samples_per_s")),
        "loss_quotient": ratio(done.trial.get("loss_final"), alone.get("loss_final")),
    }


def _full(bench: Bench, micro: int, common: Mapping[str, Any], peak: int) -> Row:
    began = time.monotonic()
    text = f"oom:micro_batch>{micro - 1}" if bench.machine.rehearsal else None
    with fault(text), _little_room(_OUTSIDE + 3 * peak // 4 if text is None else None):
        given = {**common, "scaling.workers": 2}
        done = bench.train("lm_pretrain", "full", given, on_ray=True)
    return {
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


def quickstart(bench: Bench) -> None:
    """Run the quickstart's training of PABBO by the real command, with Ray."""
    bench.measure("quickstart", lambda: _quickstart(bench))


def _quickstart(bench: Bench) -> Row:
    small = {"train_small.pabbo.horizon": 3, "train_small.training.effective_batch": 4}
    whole = {"train_small.pabbo.horizon": 30, "train_small.pabbo.policy_batch": 16}
    given = {"train_small.training.steps": bench.pick(400, 80, 3), **whole}
    given |= bench.pick({}, {}, small)
    run_dir, began = bench.folder / "quickstart", time.monotonic()
    status = raypipe("run", "quickstart", given, run_dir, "--only", "train_small")
    seconds = time.monotonic() - began
    if status:
        return {"status": "failed", "error": f"exit status {status}: the message is above"}
    (trial,) = rows_of(rp.open(run_dir), "trials")
    names = ("steps", "samples_per_s", "gpu_util_mean", "gpu_peak_bytes", "loss_final")
    return {
        **{name: trial.get(name) for name in ("status", *names)},
        "command_s": seconds,
        "training_s": trial.get("duration_s"),
    }


def raypipe(verb: str, config: str, given: Mapping[str, Any], run_dir: Path, *options: str) -> int:
    """Run a command of raypipe's and return its exit status; it ends in order with this process."""
    texts = [f"{key}={value}" for key, value in given.items()]
    command = [sys.executable, "-m", "raypipe", verb, config, *texts, *options]
    process = subprocess.Popen([*command, "--run-dir", str(run_dir)])
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def teleclass(bench: Bench) -> None:
    """Measure the stages of TELEClass, and the speed of a classifier of BERT's size."""
    bench.measure("stages", lambda: _teleclass(bench))
    if not bench.quick and not bench.machine.rehearsal:
        bench.measure("classifier", _classifier)


def _teleclass(bench: Bench) -> list[Row]:
    epochs = bench.pick({}, {"training.epochs": 3}, {"training.epochs": 1})
    run_dir, local = bench.folder / "teleclass", bench.pick(False, True, True)
    error = None
    try:
        given = bench.overrides("teleclass", epochs)
        run = rp.run("teleclass", given, run_dir=run_dir, local=local)
    except rp.RunFailedError as failed:
        run, error = failed.run, message(failed)
    trained = {row["stage"]: row for row in rows_of(run, "trials")}
    quality = {
        row["phase"]: row
        for row in rows_of(run, "measures")
        if row["documents_of"] == "test" and row["level"] == "all"
    }
    return [
        {
            "case": row["stage"],
            **{key: row[key] for key in ("status", "duration_s", "gpu_peak_bytes")},
            "samples_per_s": trained.get(row["stage"], {}).get("samples_per_s"),
            "example_f1": quality.get(row["stage"], {}).get("example_f1"),
            "error": error if row["status"] == "failed" else None,
        }
        for row in rows_of(run, "stages")
    ]


def _classifier() -> list[Row]:
    """Return the speed and memory of a classifier of BERT's size, 512 tokens, 16 at once."""
    from benchmarks.teleclass import measure_classifier

    return [
        {
            "case": f"BERT, {row['precision']}, {'training' if row['training'] else 'inference'}",
            "status": "out_of_memory" if row["peak_bytes"] is None else "succeeded",
            "samples_per_s": row["samples_per_s"],
            "gpu_peak_bytes": row["peak_bytes"],
        }
        for row in measure_classifier([16], 10)["rows"]
    ]


def t5(bench: Bench) -> None:
    """Train a T5 of 220 M parameters from scratch on docstrings."""
    bench.measure("t5", lambda: _t5(bench))


def _t5(bench: Bench) -> Row:
    given = {
        "training.precision": bench.precision("summarization"),
        "training.steps": bench.pick(200, 40, 6),
        "training.log_every": bench.pick(20, 10, 2),
    }
    given |= bench.pick({}, {"training.compile": False}, {"training.effective_batch": 8})
    done = bench.train("summarization", "t5", given)
    names = ("compile", "precision", "micro_batch", "parameters", "eval_cross_entropy")
    return {
        **done.columns(*names, *_SPEED, "tokens_per_s", "energy_j", "attempts"),
        "loss_first": next((row["loss"] for row in done.steps), None),
    }


def sweep(bench: Bench) -> None:
    """Run ``raypipe sweep sweeps/transformer``: a row per trial."""
    bench.measure("sweep", lambda: _sweep(bench))


def _sweep(bench: Bench) -> Row | list[Row]:
    run_dir, own = bench.folder / "sweep", bench.precision("transformer")
    compared = list(dict.fromkeys(("fp32", own)))
    given: dict[str, Any] = {
        "sweep.axes.training.micro_batch": bench.pick([8, 32, 128], [8, 32], [4, 8]),
        "sweep.axes.training.precision": bench.pick(compared, [own], ["fp32"]),
        "sweep.axes.training.accumulation": [1],
        "sweep.repeats": bench.pick(3, 1, 1),
        **bench.pick({}, {"train.training.compile": False}, WORKLOADS["transformer"].small),
        **bench.pick({}, {"sweep.steps": 6}, {"sweep.steps": 2, "sweep.warmup_steps": 1}),
    }
    if raypipe("sweep", "sweeps/transformer", given, run_dir) == 2:
        return {"status": "refused", "error": "exit status 2: the message is above"}
    run = rp.open(run_dir)
    best = {row["trial_id"] for row in rows_of(run, "recommendations") if "trial_id" in row}
    names = (
        *("status", "micro_batch", "precision", "samples_per_s", "gpu_peak_bytes"),
        *("energy_j", "mfu", "parity", "reason"),
    )
    return [
        {**{name: trial.get(name) for name in names}, "recommended": trial["trial_id"] in best}
        for trial in rows_of(run, "trials")
    ]
