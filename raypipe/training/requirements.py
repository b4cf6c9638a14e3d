"""Hardware of a training: what it requires, and how much of a cluster it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe import hardware
from raypipe.hardware import Hardware
from raypipe.training.settings import TrainStageSettings


@dataclass(frozen=True)
class Obstacle:
    """A setting that the hardware cannot run; ``advice`` says what to change."""

    key: str
    value: Any
    reason: str
    advice: str


def obstacles(
    stage: str, settings: TrainStageSettings, nodes: Sequence[Hardware]
) -> list[Obstacle]:
    """Return the settings of a training stage that these nodes cannot run, with full keys."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    scaling, each = settings.scaling, settings.scaling.gpus_per_worker
    on_gpu = hardware.lowest_compute_capability(nodes) if each != 0 else None
    allowed = hardware.supported_precisions(on_gpu)
    found = []
    wanted = {f"{stage}.training.precision": settings.training.precision}
    if "bf16" in settings.on_oom:
        wanted[f"{stage}.on_oom"] = "bf16"
    for key, precision in wanted.items():
        if reason := settings.unusable.get(precision):
            found.append(Obstacle(key, precision, reason, "choose another precision"))
        elif precision not in allowed:
            reason = f"this {'GPU' if on_gpu else 'CPU'} lacks {precision}"
            found.append(Obstacle(key, precision, reason, f"allowed here: {', '.join(allowed)}"))
        elif reason := hardware.missing_package(precision):
            found.append(Obstacle(key, precision, reason, "install it, or use bf16"))
    optimizer, precision = settings.training.optimizer, settings.training.precision
    if settings.training.weights == "bf16" and (optimizer, precision) != ("adafactor", "bf16"):
        reason = f"with optimizer = {optimizer} and precision = {precision}"
        advice = "such weights need adafactor and precision = bf16; use fp32"
        found.append(Obstacle(f"{stage}.training.weights", "bf16", reason, advice))
    workers = scaling.worker_count
    if each is None and 0 < len(gpus) < workers:
        reason = f"there are only {len(gpus)} GPUs for {workers} workers"
        advice = (
            f"lower it, or set {stage}.scaling.gpus_per_worker to share GPUs (0.5) or to use the "
            "CPUs (0)"
        )
        found.append(Obstacle(f"{stage}.scaling.workers", workers, reason, advice))
    shared = gpus and each is not None and 0 < each < 1 and scaling.worker_count > 1
    if shared and "fsdp" in (scaling.strategy, *settings.on_oom):
        reason = "workers that share a GPU cannot shard a model (strategy or on_oom: fsdp)"
        advice = "NCCL rejects them; use ddp, or one GPU per worker"
        found.append(Obstacle(f"{stage}.scaling.gpus_per_worker", each, reason, advice))
    if each != 0 and workers > 1 and any(gpu.is_slice for gpu in gpus):
        reason, advice = "NCCL does not connect MIG slices", "use 1 worker, or disable MIG"
        found.append(Obstacle(f"{stage}.scaling.workers", workers, reason, advice))
    return found


def beyond(stage: str, settings: TrainStageSettings, node: Hardware) -> list[Obstacle]:
    """Return the settings for which the workers are larger than a node, with full keys."""
    scaling, gpus = settings.scaling, len(node.gpus)
    found = []
    cpus, each = cpus_of_a_worker(settings), scaling.gpus_per_worker or 0.0
    room = min(
        int(node.cpus / cpus + 1e-9), int(gpus / each + 1e-9) if each else scaling.worker_count
    )
    if scaling.reserved_cpus > node.cpus:
        key, reason = f"{stage}.scaling.cpus_per_worker", f"this machine has {node.cpus} CPUs"
        advice = "lower it, or use a cluster with larger nodes (`raypipe run --address`)"
        found.append(Obstacle(key, scaling.reserved_cpus, reason, advice))
    if (scaling.gpus_per_worker or 0) > gpus:
        key, reason = f"{stage}.scaling.gpus_per_worker", f"this machine has {gpus or 'no'} GPUs"
        advice = (
            "lower it (0 uses the CPUs), or use a cluster that has them (`raypipe run --address`)"
        )
        found.append(Obstacle(key, scaling.gpus_per_worker, reason, advice))
    if not found and room < (workers := scaling.worker_count):
        need = f"{cpus:g} CPU(s)" + f" and {each:g} GPU(s)" * bool(each)
        has = f"{node.cpus} CPU(s)" + f" and {gpus} GPU(s)" * bool(each)
        if cpus > scaling.reserved_cpus:
            need += " with its loader processes"
        key = "scaling.workers" if room else "loader.workers"
        value = workers if room else settings.loader.workers
        reason = f"needs {need} per worker, and this machine has {has}"
        advice = f"give at most {room}" if room else "lower it"
        advice += ", or use a cluster (`raypipe run --address`)"
        found.append(Obstacle(f"{stage}.{key}", value, reason, advice))
    return found


def cpus_of_a_worker(settings: TrainStageSettings) -> float:
    """Return the CPUs that a worker reserves, with those of its loader's processes."""
    return settings.scaling.reserved_cpus + settings.loader.workers


def automatic_workers(
    settings: TrainStageSettings,
    effective_batch: int,
    nodes: Sequence[Hardware],
    trainings: int = 1,
) -> int:
    """Return the number of workers that ``scaling.workers: auto`` stands for.

    On CPUs it is one, since a worker can use many cores. On GPUs it is what fits on an equal share
    of the nodes, at most one worker per sample of a step, and one on MIG slices, which NCCL does
    not connect.

    Args:
        settings: of the training, with ``gpus_per_worker`` resolved.
        effective_batch: samples per optimizer step.
        nodes: the hardware of the cluster.
        trainings: number of trainings that may run at the same time, this one included.

    """
    gpus = settings.scaling.gpus_per_worker
    if not gpus or any(gpu.is_slice for node in nodes for gpu in node.gpus):
        return 1
    cpus = cpus_of_a_worker(settings)
    room = sum(min(int(len(node.gpus) / gpus), int(node.cpus / cpus)) for node in nodes)
    return max(1, min(effective_batch, room // trainings))
