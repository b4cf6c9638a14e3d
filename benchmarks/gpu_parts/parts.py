"""The parts in order of value, each with its time limit and what its section shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu_parts import memory, runs, training
from benchmarks.gpu_parts.bench import Bench, Machine, Row

_SPEED = ("samples_per_s", "step_time_s", "mfu", "gpu_peak_bytes")


@dataclass(frozen=True)
class Part:
    """A function that yields rows, and the columns of its section.

    Args:
        name: of the part, its file and its run directories.
        title: the heading of its section.
        function: yields the rows.
        seconds: the time limit; of all parts for one card together, 30 minutes.
        columns: of the section; the file has all.
        gpus: the GPUs that it needs.
        rehearsed: whether it runs on the CPU, too.

    """

    name: str
    title: str
    function: Callable[[Bench], Iterator[Row]]
    seconds: int
    columns: Sequence[str]
    gpus: int = 1
    rehearsed: bool = True

    def obstacle(self, machine: Machine) -> str | None:
        """Return why the part cannot run on a machine; None if it can."""
        if machine.rehearsal:
            return None if self.rehearsed else "needs a GPU"
        if machine.gpus < self.gpus:
            return f"needs {self.gpus} GPUs; this machine has {machine.gpus}"
        return None


PARTS = (
    Part(
        "losses",
        "Losses of each precision next to fp32",
        training.losses,
        300,
        (
            *("workload", "phase", "precision", "difference_max", "difference_mean", "loss_final"),
            *("samples_per_s", "gpu_peak_bytes", "skipped_steps"),
        ),
    ),
    Part(
        "out_of_memory",
        "Out of memory where it is predicted",
        memory.out_of_memory,
        240,
        (
            *("precision", "micro_batch", "expected", "found", "as_predicted"),
            *("predicted_peak_bytes", "gpu_peak_bytes", "attempts", "micro_batch_at_end"),
            "checkpointing_at_end",
        ),
    ),
    Part(
        "predictions",
        "Predicted and measured memory and speed",
        memory.predictions,
        420,
        (
            *("workload", "precision", "micro_batch", "accumulation", "predicted_peak_bytes"),
            *("gpu_peak_bytes", "peak_ratio", "predicted_step_time_s", "step_time_s"),
            *("speed_ratio", "speed_within_interval", "measurements"),
        ),
    ),
    Part(
        "mfu",
        "MFU of the medium language model",
        training.mfu,
        150,
        ("compile", "micro_batch", "accumulation", "precision", "tokens_per_s", *_SPEED),
    ),
    Part(
        "loader",
        "Loader processes",
        training.loader,
        150,
        ("loader_workers", *_SPEED[:2], "loader_wait_share", "bound", "gpu_util_mean"),
    ),
    Part(
        "telemetry",
        "NVML next to nvidia-smi",
        training.telemetry,
        60,
        (
            *("source", "samples", "gpu_util_mean", "power_w_mean", "memory_max_bytes"),
            *("energy_j", "energy_j_per_sample"),
        ),
        rehearsed=False,
    ),
    Part(
        "two_cards",
        "Two cards: DDP, FSDP, and one full card",
        runs.two_cards,
        240,
        (
            *("case", *_SPEED, "speedup", "loss_quotient", "attempts", "failures"),
            "micro_batch_at_end",
        ),
        gpus=2,
    ),
    Part(
        "teleclass",
        "TELEClass",
        runs.teleclass,
        150,
        ("case", "status", "duration_s", "samples_per_s", "gpu_peak_bytes", "example_f1"),
    ),
    Part(
        "t5",
        "T5 from scratch",
        runs.t5,
        120,
        ("precision", "micro_batch", *_SPEED, "loss_first", "loss_final", "eval_cross_entropy"),
    ),
    Part(
        "sweep",
        "A sweep by the command",
        runs.sweep,
        180,
        (
            *("micro_batch", "precision", "status", "samples_per_s", "predicted_peak_bytes"),
            *("gpu_peak_bytes", "energy_j_per_sample", "parity", "recommended"),
        ),
    ),
)
