"""The parts in order of value, each with its time and what its section shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.gpu_parts import contenders, memory, pabbo, rates, runs, training
from benchmarks.gpu_parts.bench import Bench, Machine

_SPEED = ("samples_per_s", "step_time_s", "mfu", "gpu_peak_bytes")


@dataclass(frozen=True)
class Part:
    """A function that measures, and the columns of its section.

    Args:
        name: of the part, its file and its run directories.
        title: the heading of its section.
        function: stores rows as it measures them.
        seconds: the time limit; of all parts for one card together, 30 minutes.
        quick: the seconds that it is expected to take on an H100 or H200 with ``--quick``; of all
            parts for one card together, nine minutes.
        columns: of the section; the file has all.
        gpus: the GPUs that it needs.

    """

    name: str
    title: str
    function: Callable[[Bench], None]
    seconds: int
    quick: int
    columns: Sequence[str]
    gpus: int = 1

    def obstacle(self, machine: Machine) -> str | None:
        """Return why the part cannot run on a machine; None if it can."""
        if not machine.rehearsal and machine.gpus < self.gpus:
            return f"needs {self.gpus} GPUs; this machine has {machine.gpus}"
        return None

    def limit(self, minutes: float, *, quick: bool) -> float:
        """Return the limit of the part in seconds, in a call of ``minutes``.

        A part may take 1.5 times its expected duration; the next part may use what it leaves. A
        call of less than nine minutes keeps these limits, and does not begin the last parts.
        """
        return 1.5 * self.quick * max(1.0, minutes / 9) if quick else self.seconds


_CONTENDERS = (
    *("contender", "compile", "micro_batch", "accumulation", "tokens_per_s", "step_time_s"),
    *("ratio", "ratio_low", "ratio_high", "mfu", "cpu_s", "steps_bytes", "bursts"),
    "loss_difference",
)
PARTS = (
    Part(
        "rates",
        "Rates of the card",
        rates.rates,
        60,
        15,
        (
            *("key", "rate", "unit", "data_sheet", "share", "context_bytes"),
            *("predicted_context_bytes", "capacity_bytes"),
        ),
    ),
    Part("loop", "raypipe's loop and the same by hand", contenders.loop, 180, 70, _CONTENDERS),
    Part(
        "mfu",
        "MFU of the medium language model",
        training.mfu,
        120,
        45,
        (
            *("compile", "dropout", "micro_batch", "accumulation", "precision", "tokens_per_s"),
            *_SPEED,
            *("mfu_measured", "loader_wait_share"),
        ),
    ),
    Part(
        "out_of_memory",
        "Out of memory where it is predicted",
        memory.out_of_memory,
        150,
        45,
        (
            *("precision", "micro_batch", "expected", "found", "as_predicted"),
            *("predicted_peak_bytes", "gpu_peak_bytes", "attempts", "micro_batch_at_end"),
            *("accumulation_at_end", "checkpointing_at_end"),
        ),
    ),
    Part(
        "losses",
        "Losses of each precision next to fp32",
        training.losses,
        240,
        60,
        (
            *("workload", "phase", "precision", "difference_max", "difference_mean", "loss_final"),
            *("samples_per_s", "gpu_peak_bytes", "skipped_steps"),
        ),
    ),
    Part(
        "telemetry",
        "NVML next to nvidia-smi",
        training.telemetry,
        60,
        20,
        (
            *("source", "samples", "gpu_util_mean", "power_w_mean", "memory_max_bytes"),
            "energy_j",
        ),
    ),
    Part("trainers", "Trainers on the same card", contenders.trainers, 180, 35, _CONTENDERS),
    Part(
        "quickstart",
        "The quickstart's training by the command",
        runs.quickstart,
        100,
        35,
        (
            *("status", "steps", "command_s", "training_s", "samples_per_s", "gpu_util_mean"),
            *("gpu_peak_bytes", "loss_final"),
        ),
    ),
    Part(
        "pabbo",
        "PABBO on the card and on its CPUs",
        pabbo.pabbo,
        60,
        25,
        (
            *("phase", "runs_on", "samples", "samples_per_s", "step_time_s", "kernels"),
            *("kernels_s", "graph_s", "graph"),
        ),
    ),
    Part(
        "predictions",
        "Predicted and measured memory and speed",
        memory.predictions,
        270,
        40,
        (
            *("workload", "precision", "micro_batch", "accumulation", "predicted_peak_bytes"),
            *("gpu_peak_bytes", "peak_ratio", "predicted_step_time_s", "step_time_s"),
            *("speed_ratio", "speed_within_interval"),
        ),
    ),
    Part(
        "t5",
        "T5 from scratch",
        runs.t5,
        100,
        30,
        ("precision", "micro_batch", *_SPEED, "loss_first", "loss_final", "eval_cross_entropy"),
    ),
    Part(
        "loader",
        "Loader processes",
        training.loader,
        100,
        35,
        ("loader_workers", *_SPEED[:2], "loader_wait_share", "gpu_util_mean"),
    ),
    Part(
        "teleclass",
        "TELEClass",
        runs.teleclass,
        100,
        30,
        ("case", "status", "duration_s", "samples_per_s", "gpu_peak_bytes", "example_f1"),
    ),
    Part(
        "sweep",
        "A sweep by the command",
        runs.sweep,
        75,
        35,
        (
            *("micro_batch", "precision", "status", "samples_per_s", "gpu_peak_bytes"),
            *("energy_j", "parity", "recommended"),
        ),
    ),
    Part(
        "two_cards",
        "Two cards: DDP, FSDP, and one full card",
        runs.two_cards,
        240,
        120,
        (
            *("case", *_SPEED, "speedup", "loss_quotient", "attempts", "failures"),
            "micro_batch_at_end",
        ),
        gpus=2,
    ),
)
