"""Trainings on one card: losses by precision, MFU, loader processes, telemetry."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from statistics import fmean
from typing import IO, Any

import torch

from benchmarks.gpu_parts.bench import NO_DROPOUT, WORKLOADS, Bench, Row
from benchmarks.loops.cases import Case
from benchmarks.loops.raypipe_loop import measured
from experiments.lm_pretrain.model import medium, tiny
from experiments.lm_pretrain.training import LanguageModelTask, RandomTokens
from raypipe.training.data_sheets import peak_flops
from raypipe.training.settings import TrainingSettings

#: goals of the medium language model at 32 x 2, bf16, compiled: MFU on an H100, reserved memory
MFU_GOAL, RESERVED_GOAL = 0.5, 25 * 2**30
_SPEED = ("status", "samples_per_s", "tokens_per_s", "step_time_s", "mfu", "gpu_peak_bytes")


def losses(bench: Bench) -> None:
    """Measure losses by precision next to those of fp32: a row per workload and phase."""
    micro = bench.pick(4, 4, 2)
    lm = {"training.effective_batch": bench.pick(16, 8, 8), "training.micro_batch": micro}
    cases: dict[str, Mapping[str, Any]] = {
        NO_DROPOUT[0]: lm,
        NO_DROPOUT[1]: {"training.effective_batch": bench.pick(32, 16, 32)},
        "pabbo_lda": {"training.effective_batch": bench.pick(32, 32, 4)},
    }
    if bench.quick:  # PABBO's steps wait for the host; it has a part of its own
        del cases["pabbo_lda"]
    for name, values in cases.items():
        for precision in bench.precisions:
            label = f"{WORKLOADS[name].config}-{precision}"
            given = {
                **values,
                "training.precision": precision,
                "training.compile": False,
                "training.steps": bench.pick(100, 40, 8),
                "training.log_every": bench.pick(5, 5, 1),
                "training.warmup_steps": 2,
            }
            reference = bench.stored(f"{WORKLOADS[name].config}-fp32")
            bench.measure(label, partial(_losses, bench, name, label, given, reference))


def _losses(
    bench: Bench, name: str, label: str, given: Mapping[str, Any], reference: Sequence[Row]
) -> list[Row]:
    done = bench.train(name, label, given)
    return [
        {
            "workload": name,
            "precision": given["training.precision"],
            "phase": phase,
            "difference_max": max(found, default=None),
            "difference_mean": fmean(found) if found else None,
            "losses": curve,
            **done.columns(*_SPEED, "loss_final", "skipped_steps"),
        }
        for phase, (curve, found) in differences(done.steps, reference).items()
    ]


def differences(
    steps: Sequence[Row], reference: Sequence[Row]
) -> dict[str, tuple[dict[str, float], list[float]]]:
    """Return the losses by step, and their relative differences to a reference, by phase.

    Without logged steps there is one phase without losses; without a reference it is compared with
    itself.
    """
    expected = {step: loss for row in reference for step, loss in row["losses"].items()}
    found: dict[str, tuple[dict[str, float], list[float]]] = {}
    for row in steps:
        curve, relative = found.setdefault(str(row["phase"]), ({}, []))
        step, loss = str(row["step"]), row["loss"]
        curve[step] = loss
        other = expected.get(step) if reference else loss
        if loss is not None and other:
            relative.append(abs(loss - other) / abs(other))
    return found or {"": ({}, [])}


def mfu(bench: Bench) -> None:
    """Measure the medium language model at 32 x 2, compiled and not: model FLOPs utilization.

    raypipe's loop runs in this process without a run directory, with loader processes.
    """
    choices = ((True, 0.1), (False, 0.1), (True, 0.0))
    for compiled, dropout in bench.pick(choices, choices[:2], ((False, 0.1),)):
        key = f"compile-{compiled}-dropout-{dropout}"
        bench.measure(key, partial(_mfu, bench, compiled, dropout))


def _mfu(bench: Bench, compiled: bool, dropout: float) -> Row:
    settings, processes = bench.pick((medium(), 8), (medium(), 4), (tiny(), 0))
    micro, steps = bench.pick((32, 40), (32, 20), (2, 20))
    device = torch.device(bench.pick("cuda:0", "cuda:0", "cpu"))
    precision = bench.precision("lm_pretrain")
    settings = settings.model_copy(update={"dropout": dropout})
    training = TrainingSettings(
        steps=steps, precision=precision, compile=compiled, log_every=5, keep_state=False
    )
    data = RandomTokens(settings.vocabulary, settings.context, 2 * micro * steps)
    task = LanguageModelTask(settings, data)
    case = Case("mfu", task, micro, 2, steps, training, processes, "tokens", settings.context)
    found = measured(case, device)[1]
    reserved, share = found.get("gpu_peak_bytes"), found.get("mfu")
    peak, rate = peak_flops(bench.machine.device, precision), bench.rate(precision)
    return {
        **{"compile": compiled, "dropout": dropout, "micro_batch": micro, "accumulation": 2},
        "precision": precision,
        **{name: found.get(name) for name in _SPEED[1:]},
        "loader_wait_share": found.get("loader_wait_share"),
        "mfu_measured": share * peak / rate / 1e12 if share and peak and rate else None,
        "mfu_goal": MFU_GOAL,
        "reserved_goal_bytes": RESERVED_GOAL,
        "reserved_met": None if reserved is None else reserved < RESERVED_GOAL,
    }


def loader(bench: Bench) -> None:
    """Measure the transformer by number of loader processes."""
    for workers in bench.pick((0, 1, 2, 4), (0, 2), (0, 1)):
        given = {
            "training.steps": bench.pick(300, 80, 6),
            "training.log_every": bench.pick(50, 20, 2),
            "training.precision": bench.precision("transformer"),
            "training.compile": False,
            "training.warmup_steps": 2,
            "loader.workers": workers,
        }
        bench.measure(f"loader-{workers}", partial(_loader, bench, workers, given))


def _loader(bench: Bench, workers: int, given: Mapping[str, Any]) -> Row:
    done = bench.train("transformer", f"loader-{workers}", given, on_ray=True)
    wait = ("loader_wait_share", "gpu_util_mean", "cpu_util_mean")
    return {"loader_workers": workers, **done.columns(*_SPEED, *wait)}


def telemetry(bench: Bench) -> None:
    """Compare what NVML reports during a training with what ``nvidia-smi`` prints meanwhile."""
    bench.measure("telemetry", lambda: _telemetry(bench))


def _telemetry(bench: Bench) -> list[Row]:
    given = bench.short("lm_pretrain", *bench.pick((8, 100, 10), (8, 60, 10), (2, 4, 2)))
    with NvidiaSmi(bench.machine.uuid) as smi:
        done = bench.train("lm_pretrain", "telemetry", given)
    nvml = [row for row in done.samples if row["util"] is not None]
    energy = ("energy_j", "samples_per_s")
    times = [datetime.fromtimestamp(row["at"] / 1000, UTC) for row in nvml]
    window = (min(times), max(times)) if times else None
    return [
        {"source": "NVML", **summary(nvml), **done.columns("status", *energy)},
        {"source": "nvidia-smi", **summary(smi.rows(window)), "error": smi.problem},
    ]


def summary(rows: Sequence[Row]) -> Row:
    """Return the means of utilization and power, and the peak of the memory."""
    found: Row = {"samples": len(rows)}
    for name, column in (("util", "gpu_util_mean"), ("power_w", "power_w_mean")):
        known = [row[name] for row in rows if row[name] is not None]
        found[column] = fmean(known) if known else None
    memory = [row["memory_bytes"] for row in rows if row["memory_bytes"] is not None]
    return found | {"memory_max_bytes": max(memory, default=None)}


class NvidiaSmi:
    """Context manager that reads a card by ``nvidia-smi`` twice per second.

    ``problem`` says why there are no samples.
    """

    _QUERY = "utilization.gpu,memory.used,power.draw"

    def __init__(self, uuid: str | None) -> None:
        self.problem = None if shutil.which("nvidia-smi") else "nvidia-smi is not installed"
        self._uuid = uuid
        self._seen: list[tuple[datetime, Row]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> NvidiaSmi:
        if self.problem is None and self._uuid is not None:
            command = ["nvidia-smi", f"--id={self._uuid}", f"--query-gpu={self._QUERY}"]
            command += ["--format=csv,noheader,nounits", "--loop-ms=500"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=[self._process.stdout], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def rows(self, window: tuple[datetime, datetime] | None) -> list[Row]:
        """Return the samples between two times."""
        return [row for at, row in self._seen if window and window[0] <= at <= window[1]]

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._seen.append((datetime.now(UTC), parse_smi(line)))


def parse_smi(line: str) -> Row:
    """Return the columns of a line that ``nvidia-smi`` printed; None for ``[N/A]``."""
    values: list[float | None] = []
    for text in line.split(","):
        values.append(None)
        with suppress(ValueError):
            values[-1] = float(text)
    util, memory_mib, power = (*values, None, None, None)[:3]
    memory = None if memory_mib is None else memory_mib * 2**20
    return {"util": util, "memory_bytes": memory, "power_w": power}
