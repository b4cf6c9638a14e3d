"""Benchmark raypipe's training loop against a hand-written one, two trainers and a library.

    python -m benchmarks.training --case lm-small [--threads 1]

All train the same model from the same weights on the same samples, with the same optimizer,
clipping, schedule, precision, accumulation and loader. They log every 10 steps, and neither
evaluate nor save during the counted steps. Each contender trains once per round, in rotating
order; its first 10 steps are not counted. The report gives the speed as a ratio to the
hand-written loop in the same round, and the largest difference to its losses: a contender that
takes different steps is not comparable. In fp32, such a difference ends the benchmark with an
error.

Cases:

- ``lm-small``: a step takes some 100 ms on a CPU;
- ``lm-tiny``: a step takes milliseconds, which exposes the overhead of a loop;
- ``transformer``: the classifier of experiments/transformer;
- ``lm-medium``: the 75 M language model at 2048 tokens for a GPU, in bf16 and compiled.

Results: ``benchmarks/results/training/<case>.json``.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.loops.cases import LOG_EVERY, NAMES, STEPS, Case, make
from benchmarks.loops.measure import (
    Contender,
    GpuUtilization,
    Logged,
    largest_difference,
    run,
)
from benchmarks.rounds import extent, rotated, write_report
from raypipe.hardware import detect
from raypipe.training.data_sheets import peak_flops

REFERENCE = "by_hand"
CONTENDERS = (REFERENCE, "raypipe_loop", "hf_trainer", "hf_accelerate", "lightning_trainer")
PACKAGES = ("torch", "raypipe-runner", "transformers", "accelerate", "lightning")
TOLERANCE = 1e-4


def measure(
    case: Case, contenders: Sequence[str], device: torch.device, rounds: int, threads: int
) -> Iterator[tuple[list[dict[str, Any]], dict[str, float]]]:
    """Yield the rows so far, and each contender's largest difference of a loss, after each round.

    There is a row per round and contender.
    """
    functions: dict[str, Contender] = {
        name: import_module(f"benchmarks.loops.{name}").train for name in contenders
    }
    peak = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), case.training.precision)
    flops = case.task.flops_per_sample(case.task.build_model())
    rows: list[dict[str, Any]] = []
    differences: dict[str, float] = {}
    gpu = GpuUtilization(device)
    try:
        for number in range(rounds):
            losses: dict[str, list[Logged]] = {}
            for name in rotated(contenders, number):
                torch.set_num_threads(threads)
                row, losses[name] = run(functions[name], case, device, LOG_EVERY, gpu)
                if flops is not None and peak is not None:
                    row["mfu"] = row["units_per_s"] / case.units * flops / peak
                rows.append({"round": number, "contender": name, **row})
                typer.echo(f"{number} {name}: {row['units_per_s']:.1f} {case.unit}/s")
            for name in contenders:
                difference = largest_difference(losses[name], losses[REFERENCE])
                differences[name] = max(differences.get(name, 0.0), difference)
            yield rows, differences
    finally:
        gpu.close()


def summarize(rows: Sequence[dict[str, Any]], differences: dict[str, float]) -> dict[str, Any]:
    """Return the medians of each contender, and its ratios to the reference by round."""
    reference = {row["round"]: row for row in rows if row["contender"] == REFERENCE}
    summary: dict[str, Any] = {}
    for name, difference in differences.items():
        mine = [row for row in rows if row["contender"] == name]
        ratios = [row["units_per_s"] / reference[row["round"]]["units_per_s"] for row in mine]
        cpu = [reference[row["round"]]["cpu_seconds"] / row["cpu_seconds"] for row in mine]
        kept = set(mine[0]) - {"round", "contender", "steps", "seconds", "cpu_seconds"}
        summary[name] = {
            "ratio": extent(ratios),
            "cpu_time_ratio": extent(cpu),
            "largest_loss_difference": difference,
            **{key: median(row[key] for row in mine) for key in sorted(kept) if _known(mine, key)},
        }
    return summary


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    """Return a description of the machine."""
    hardware = detect()
    lines = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (lines.read_text().splitlines() if lines.is_file() else ())
        if line.startswith("model name")
    ]
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "gpu_driver": hardware.driver if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "cpu": models[0] if models else platform.machine(),
        "cpus": hardware.cpus,
        "memory_bytes": hardware.memory_bytes,
        "threads": threads,
        "python": platform.python_version(),
    }


def table(case: Case, summary: dict[str, Any]) -> Table:
    """Return the summary to print."""
    title = f"{case.name}: medians over the rounds; ratios to {REFERENCE}"
    shown = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    on_gpu = any("peak_reserved_bytes" in entry for entry in summary.values())
    shown.add_column("contender", no_wrap=True)
    columns = [f"{case.unit}/s", "step, ms", "ratio", "lowest", "highest", "CPU", "losses"]
    for column in (*columns, *(["MFU", "peak GiB", "GPU, %"] if on_gpu else [])):
        shown.add_column(column, justify="right")
    for name, entry in summary.items():
        cells = [
            name,
            f"{entry['units_per_s']:,.{1 if entry['units_per_s'] < 1000 else 0}f}",
            f"{entry['step_ms_median']:.2f}",
            *(f"{entry['ratio'][key]:.3f}" for key in ("median", "low", "high")),
            f"{entry['cpu_time_ratio']['median']:.3f}",
            f"{entry['largest_loss_difference']:.0e}",
        ]
        if on_gpu:
            for key, unit in (("mfu", 1.0), ("peak_reserved_bytes", 2**30), ("gpu_util_mean", 1.0)):
                cells.append(f"{entry[key] / unit:.3g}" if key in entry else "")
        shown.add_row(*cells)
    return shown


def main(
    case: Annotated[str | None, typer.Option(help=", ".join(NAMES))] = None,
    rounds: Annotated[int, typer.Option(min=1, help="how often each contender trains")] = 7,
    steps: Annotated[int | None, typer.Option(help="of a training; by the case")] = None,
    contenders: Annotated[str, typer.Option(help="separated by commas")] = ",".join(CONTENDERS),
    threads: Annotated[int | None, typer.Option(help="of PyTorch; its own default")] = None,
    loader_workers: Annotated[
        int | None, typer.Option(help="loader processes of each; 8 on a GPU, else none")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path(
        "benchmarks/results/training"
    ),
) -> None:
    """Measure the contenders alternately and write the results."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if torch.cuda.device_count() > 1:  # Hugging Face's Trainer would use all GPUs
        raise typer.BadParameter("there are several GPUs: choose one by CUDA_VISIBLE_DEVICES")
    name = case or ("lm-medium" if device.type == "cuda" else "lm-small")
    if name not in NAMES:
        raise typer.BadParameter(f"--case {name}: there are {', '.join(NAMES)}")
    length = steps or STEPS[name]
    if length < 2 * LOG_EVERY or length % LOG_EVERY:
        raise typer.BadParameter(f"--steps {length}: a multiple of {LOG_EVERY}, at least twice it")
    chosen = [REFERENCE, *(c for c in contenders.split(",") if c != REFERENCE)]
    if unknown := [c for c in chosen if c not in CONTENDERS]:
        raise typer.BadParameter(f"--contenders {unknown[0]}: there are {', '.join(CONTENDERS)}")
    threads = threads or torch.get_num_threads()
    processes = loader_workers if loader_workers is not None else 8 * (device.type == "cuda")

    what = make(name, length, device, processes)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {
        "case": name,
        "micro_batch": what.micro_batch,
        "accumulation": what.accumulation,
        "steps": length,
        "warmup_steps": LOG_EVERY,
        "loader_workers": processes,
        "training": what.training.model_dump(mode="json"),
    }
    about = machine(device, threads)
    for rows, differences in measure(what, chosen, device, rounds, threads):
        report |= {"summary": summarize(rows, differences), "rounds": rows}
        write_report(out / f"{name}.json", started, about, PACKAGES, **report)
    Console().print(table(what, report["summary"]))
    worst = max(entry["largest_loss_difference"] for entry in report["summary"].values())
    typer.echo(f"largest relative difference of a logged loss: {worst:.1e}")
    if what.training.precision == "fp32" and not worst <= TOLERANCE:
        typer.echo(f"above {TOLERANCE}: the contenders did not take the same steps", err=True)
        raise typer.Exit(1)


def _known(rows: Sequence[dict[str, Any]], key: str) -> bool:
    return all(row[key] is not None for row in rows)


if __name__ == "__main__":
    typer.run(main)
