"""Trainings on one card: losses by precision, MFU, loader processes, telemetry."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from statistics import fmean
from typing import IO, Any

from benchmarks.gpu_parts.bench import NO_DROPOUT, WORKLOADS, Bench, Row, Trained

#: goals of the medium language model at 32 x 2, bf16, compiled: MFU on an H100, reserved memory
MFU_GOAL, RESERVED_GOAL = 0.5, 25 * 2**30
_SPEED = ("status", "samples_per_s", "tokens_per_s", "step_time_s", "mfu", "gpu_peak_bytes")


def losses(bench: Bench) -> Iterator[Row]:
    """Yield a row per workload, precision and phase: its losses next to those of fp32."""
    micro = bench.pick(4, 2)
    cases: Mapping[str, Mapping[str, Any]] = {
        NO_DROPOUT[0]: {"training.effective_batch": 4 * micro, "training.micro_batch": micro},
        NO_DROPOUT[1]: {"training.effective_batch": 32},
        "pabbo_lda": {"training.effective_batch": bench.pick(32, 4)},
    }
    for name, values in cases.items():
        reference: Trained | None = None
        for precision in bench.precisions:
            given = {
                **values,
                "training.precision": precision,
                "training.compile": False,
                "training.steps": bench.pick(100, 8),
                "training.log_every": bench.pick(5, 1),
                "training.warmup_steps": 2,
            }
            done = bench.train(name, f"{WORKLOADS[name].config}-{precision}", given)
            if precision == "fp32":
                reference = done
            expected = reference.steps if reference is not None else []
            for phase, (curve, found) in differences(done.steps, expected).items():
                yield {
                    "workload": name,
                    "precision": precision,
                    "phase": phase,
                    "difference_max": max(found, default=None),
                    "difference_mean": fmean(found) if found else None,
                    "losses": curve,
                    **done.columns(*_SPEED, "loss_final", "skipped_steps"),
                }


def differences(
    steps: Sequence[Row], reference: Sequence[Row]
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the losses, and their relative differences to a reference, by phase.

    Without logged steps there is one phase without losses.
    """
    expected = {row["step"]: row["loss"] for row in reference}
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in steps:
        curve, relative = found.setdefault(str(row["phase"]), ([], []))
        curve.append(row["loss"])
        other = expected.get(row["step"])
        if row["loss"] is not None and other:
            relative.append(abs(row["loss"] - other) / abs(other))
    return found or {"": ([], [])}


def mfu(bench: Bench) -> Iterator[Row]:
    """Yield a row for the medium language model at 32 x 2, compiled and not."""
    short = bench.short("lm_pretrain", *bench.pick((32, 30, 5), (2, 4, 2)))
    for compiled in bench.pick((True, False), (False,)):
        given = {**short, "training.compile": compiled}
        done = bench.train("lm_pretrain", f"compile-{compiled}", given)
        reserved = done.trial.get("gpu_peak_bytes")
        yield {
            "compile": compiled,
            **done.columns("micro_batch", "accumulation", "precision", *_SPEED, "attempts"),
            "mfu_goal": MFU_GOAL,
            "reserved_goal_bytes": RESERVED_GOAL,
            "reserved_met": None if reserved is None else reserved < RESERVED_GOAL,
        }


def loader(bench: Bench) -> Iterator[Row]:
    """Yield a row per number of loader processes of the transformer."""
    for workers in bench.pick((0, 1, 2, 4, "auto"), (0, 1, "auto")):
        given = {
            "training.steps": bench.pick(300, 6),
            "training.log_every": bench.pick(50, 2),
            "training.precision": bench.precision("transformer"),
            "training.compile": False,
            "training.warmup_steps": 2,
            "loader.workers": workers,
        }
        done = bench.train("transformer", f"loader-{workers}", given, on_ray=True)
        wait = ("loader_wait_share", "bound", "gpu_util_mean", "cpu_util_mean")
        yield {"loader_workers": str(workers), **done.columns(*_SPEED, *wait)}


def telemetry(bench: Bench) -> Iterator[Row]:
    """Yield what NVML reports during a training, and what ``nvidia-smi`` prints meanwhile."""
    given = bench.short("lm_pretrain", *bench.pick((8, 100, 10), (2, 4, 2)))
    with NvidiaSmi(bench.machine.uuid) as smi:
        done = bench.train("lm_pretrain", "telemetry", given)
    nvml = [row for row in done.samples if row["util"] is not None]
    energy = ("energy_j", "energy_j_per_sample", "samples_per_s", "gpu_shared")
    yield {"source": "NVML", **summary(nvml), **done.columns("status", *energy)}
    times = [datetime.fromtimestamp(row["at"] / 1000, UTC) for row in nvml]
    window = (min(times), max(times)) if times else None
    yield {"source": "nvidia-smi", **summary(smi.rows(window)), "error": smi.problem}


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
