"""Trainings on fake cards: steps of the real training loop, with a process per card."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from experiments.lm_pretrain.model import LmSettings, medium
from experiments.lm_pretrain.training import random_task
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.failure_kinds import expandable_segments
from raypipe.training.history import History
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.optimizer import Update
from raypipe.training.parallel import Worker
from raypipe.training.settings import ScalingSettings, TrainingSettings, TrainStageSettings
from raypipe.training.task import TrainTask
from tests.gpu.rig.counters import counters
from tests.gpu.rig.objects import exchange_by_store

#: weights and activations of some 10 to 100 MB: rounding by the allocator does not matter
SMALL = LmSettings(
    vocabulary=512, width=512, heads=8, layers=12, feed_forward=1536, context=128, dropout=0.0
)
_STEPS = 3


def language_model(size: str = "small") -> TrainTask:
    """Return the language model on random tokens."""
    return random_task(medium() if size == "medium" else SMALL)


@dataclass(frozen=True)
class Case:
    """A training with ``(micro_batch, accumulation, effective_batch, workers)`` of ``plan``."""

    task: TrainTask
    plan: tuple[int, int, int, int] = (4, 1, 4, 1)
    strategy: Literal["ddp", "fsdp"] = "ddp"
    training: Mapping[str, Any] = field(default_factory=dict)


def run(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Train each case for three steps; all have the same number of workers, a card for each.

    Return of rank 0 the peak memory, the weights and those of blocks in bytes, the numbers in
    matrices of blocks, whether segments of memory expand, and the counters of the last step.
    """
    (workers,) = {case.plan[3] for case in cases.values()}
    with tempfile.TemporaryDirectory() as folder:
        if workers == 1:
            os.environ |= expandable_segments()
            return _train_all(cases, Worker(0, torch.device("cuda", 0)), folder)
        spawn(_member, (folder, cases, workers), nprocs=workers)
        found: dict[str, dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
        return found


def main() -> None:
    """Train the cases of the variable CASES, and print as JSON what ``run`` returns."""
    task, cases = language_model(), json.loads(os.environ["CASES"])
    print(json.dumps(run({name: Case(task, **case) for name, case in cases.items()})))


def _member(rank: int, folder: str, cases: Mapping[str, Case], workers: int) -> None:
    device = torch.device("cuda", rank)
    exchange_by_store()
    os.environ |= {"RIG_NCCL_MEETING": folder, **expandable_segments()}
    torch.cuda.set_device(device)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=workers)
    found = _train_all(cases, Worker(rank, device, workers), folder)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    os._exit(0)  # a sharded model that outlives its process group aborts the interpreter's end


def _train_all(cases: Mapping[str, Case], worker: Worker, folder: str) -> dict[str, dict[str, Any]]:
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN does not run on fake cards
    found = {}
    for name, case in cases.items():
        settings = TrainStageSettings(
            training=TrainingSettings(steps=_STEPS, **{"log_every": _STEPS, **case.training}),
            scaling=ScalingSettings(workers=case.plan[3], strategy=case.strategy),
        )
        run_dir = RunDirectory.at(Path(folder, name))
        plan = BatchPlan(*case.plan)
        job = TrainingJob("fit", "run-1", case.task, settings, plan, run_dir, measured=True)
        found[name] = counted(job, worker)
        model = case.task.build_model()
        inside = [weight for block in case.task.blocks(model) for weight in block.parameters()]
        found[name] |= {
            "weights": sum(weight.nbytes for weight in model.parameters()),
            "blocks": sum(weight.nbytes for weight in inside),
            "matrices": sum(weight.numel() for weight in inside if weight.ndim == 2),
        }
    return found


def counted(job: TrainingJob, worker: Worker) -> dict[str, Any]:
    """Train; return the peaks of memory in bytes, the outcome, and the counters of the last step.

    Kernels compute nothing, so logged values have no meaning and are dropped when they arrive.
    """
    marks: list[dict[str, int]] = []
    step = Update.step
    History.settle = lambda *_: None  # type: ignore[method-assign]

    def marked(update: Update, *arguments: Any, **named: Any) -> Any:
        norm = step(update, *arguments, **named)
        marks.append(counters())
        return norm

    Update.step = marked  # type: ignore[method-assign]
    try:
        outcome = train(job, worker)
    finally:
        Update.step = step  # type: ignore[method-assign]
    before, after = marks[-2:]
    return {
        "peak": torch.cuda.max_memory_allocated(worker.device),
        "reserved": torch.cuda.max_memory_reserved(worker.device),
        "expandable": all(part["is_expandable"] for part in torch.cuda.memory_snapshot()),
        "outcome": outcome,
        **{name: after[name] - before[name] for name in after},
    }
