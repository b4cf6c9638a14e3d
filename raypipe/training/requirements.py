"""Hardware of a training: what it requires, and how much of a cluster it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe import hardware
from raypipe.hardware import Hardware, Precision
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
    found: list[Obstacle] = []

    def refuse(key: str, value: Any, reason: str, advice: str) -> None:
        found.append(Obstacle(f"{stage}.{key}", value, reason, advice))

    gpus = [gpu for node in nodes for gpu in node.gpus]
    training, scaling = settings.training, settings.scaling
    each, workers = scaling.gpus_per_worker, scaling.worker_count
    on_gpu = hardware.lowest_compute_capability(nodes) if each != 0 else None
    allowed = hardware.supported_precisions(on_gpu)
    wanted: dict[str, Precision] = {"training.precision": training.precision}
    if "bf16" in settings.on_oom:
        wanted["on_oom"] = "bf16"
    for key, precision in wanted.items():
        if reason := settings.unusable.get(precision):
            refuse(key, precision, reason, "choose another precision")
        elif precision not in allowed:
            lacks = f"this {'GPU' if on_gpu else 'CPU'} lacks {precision}"
            refuse(key, precision, lacks, f"allowed here: {', '.join(allowed)}")
        elif reason := hardware.missing_package(precision):
            refuse(key, precision, reason, "install it, or use bf16")
    kinds = training.optimizer, training.precision
    if training.weights == "bf16" and kinds != ("adafactor", "bf16"):
        reason = f"with optimizer = {kinds[0]} and precision = {kinds[1]}"
        advice = "such weights need adafactor and precision = bf16; use fp32"
        refuse("training.weights", "bf16", reason, advice)
    if each is None and 0 < len(gpus) < workers:
        reason = f"there are only {len(gpus)} GPUs for {workers} workers"
        share = f"set {stage}.scaling.gpus_per_worker to share GPUs (0.5) or to use the CPUs (0)"
        refuse("scaling.workers", workers, reason, f"lower it, or {share}")
    shared = gpus and each is not None and 0 < each < 1 and workers > 1
    if shared and "fsdp" in (scaling.strategy, *settings.on_oom):
        reason = "workers that share a GPU cannot shard a model (strategy or on_oom: fsdp)"
        advice = "NCCL rejects them; use ddp, or one GPU per worker"
        refuse("scaling.gpus_per_worker", each, reason, advice)
    if each != 0 and workers > 1 and any(gpu.is_slice for gpu in gpus):
        reason, advice = "NCCL does not connect MIG slices", "use 1 worker, or disable MIG"
        refuse("scaling.workers", workers, reason, advice)
    return found


def beyond(stage: str, settings: TrainStageSettings, node: Hardware) -> list[Obstacle]:
    """Return the settings for which the workers are larger than a node, with full keys."""
    scaling, workers = settings.scaling, settings.scaling.worker_count
    cpus, gpus = cpus_of_a_worker(settings), scaling.gpus_per_worker or 0.0
    cluster = "or use a cluster (`raypipe run --address`)"
    found = []
    if scaling.reserved_cpus > node.cpus:
        key, reason = f"{stage}.scaling.cpus_per_worker", f"this machine has {node.cpus} CPUs"
        found.append(Obstacle(key, scaling.reserved_cpus, reason, f"lower it, {cluster}"))
    if gpus > len(node.gpus):
        key, has = f"{stage}.scaling.gpus_per_worker", len(node.gpus) or "no"
        advice = f"lower it (0 uses the CPUs), {cluster}"
        found.append(Obstacle(key, scaling.gpus_per_worker, f"this machine has {has} GPUs", advice))
    room = int(node.cpus / cpus + 1e-9)
    if gpus:
        room = min(room, int(len(node.gpus) / gpus + 1e-9))
    if not found and room < workers:
        need = f"{cpus:g} CPU(s)" + f" and {gpus:g} GPU(s)" * bool(gpus)
        all_of = f"{node.cpus} CPU(s)" + f" and {len(node.gpus)} GPU(s)" * bool(gpus)
        if cpus > scaling.reserved_cpus:
            need += " with its loader processes"
        reason = f"needs {need} per worker, and this machine has {all_of}"
        key, value, advice = "scaling.workers", workers, f"give at most {room}"
        if not room:
            key, value, advice = "loader.workers", settings.loader.workers, "lower it"
        found.append(Obstacle(f"{stage}.{key}", value, reason, f"{advice}, {cluster}"))
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
