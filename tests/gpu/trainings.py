"""Trainings on fake cards: steps of the real training loop, with a process per card.

They are of a language model, or a stage of a workload as a profile sets it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from experiments.common import cross_entropy
from experiments.lm_pretrain.model import LmSettings, medium
from experiments.lm_pretrain.training import random_task
from raypipe.commands.configuration import read, resolve
from raypipe.hardware import Gpu, detect
from raypipe.store.run_directory import RunDirectory
from raypipe.training import loop
from raypipe.training.batching import BatchPlan
from raypipe.training.failure_kinds import expandable_segments
from raypipe.training.history import History
from raypipe.training.job import TrainingJob
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


@dataclass(frozen=True)
class Case:
    """A training of a language model on random tokens.

    ``plan`` is ``(micro_batch, accumulation, effective_batch, workers)``, and ``chunk`` the numbers
    in a part of the logits.
    """

    model: Literal["small", "medium"] = "small"
    plan: tuple[int, int, int, int] = (4, 1, 4, 1)
    strategy: Literal["ddp", "fsdp"] = "ddp"
    training: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = cross_entropy.CHUNK


def measured(given: Mapping[str, Any]) -> Any:
    """Train the cases for three steps; return their measures.

    All have the same number of workers, and a card for each. The measures are of rank 0: the peak
    memory, the weights and those of blocks in bytes, the numbers in matrices of blocks, whether
    segments of memory expand, and the counters of the last step.
    """
    cases = {name: Case(**case) for name, case in given.items()}
    (workers,) = {case.plan[3] for case in cases.values()}
    with tempfile.TemporaryDirectory() as folder:
        if workers == 1:
            os.environ |= expandable_segments()
            _train_all(cases, Worker(0, torch.device("cuda", 0)), folder)
        else:
            spawn(_member, (folder, cases, workers), nprocs=workers)
        return json.loads(Path(folder, "found.json").read_text())


def _member(rank: int, folder: str, cases: Mapping[str, Case], workers: int) -> None:
    device = torch.device("cuda", rank)
    exchange_by_store()
    os.environ |= {"RIG_NCCL_MEETING": folder, **expandable_segments()}
    torch.cuda.set_device(device)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=workers)
    _train_all(cases, Worker(rank, device, workers), folder)
    os._exit(0)  # a sharded model that outlives its process group aborts the interpreter's end


def _train_all(cases: Mapping[str, Case], worker: Worker, folder: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN does not run on fake cards
    found = {}
    for name, case in cases.items():
        cross_entropy.linear_cross_entropies.__kwdefaults__["chunk"] = case.chunk
        task = random_task(medium() if case.model == "medium" else SMALL)
        settings = TrainStageSettings(
            training=TrainingSettings(steps=_STEPS, **{"log_every": _STEPS, **case.training}),
            scaling=ScalingSettings(workers=case.plan[3], strategy=case.strategy),
        )
        run_dir = RunDirectory.at(Path(folder, name))
        plan = BatchPlan(*case.plan)
        job = TrainingJob("fit", "run-1", task, settings, plan, run_dir, measured=True)
        found[name] = counted(job, worker)
        model = task.build_model()
        inside = [weight for block in task.blocks(model) for weight in block.parameters()]
        found[name] |= {
            "weights": sum(weight.nbytes for weight in model.parameters()),
            "blocks": sum(weight.nbytes for weight in inside),
            "matrices": sum(weight.numel() for weight in inside if weight.ndim == 2),
        }
    if worker.rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


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
        outcome = loop.train(job, worker)
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


def stages(
    config: str, profile: str, overrides: Sequence[str], memory: int, capability: str
) -> Iterator[tuple[str, TrainTask, TrainStageSettings]]:
    """Yield the name, the task and the settings of each training stage on a machine with a card."""
    node = replace(detect(), gpus=(Gpu(0, "", "", memory, capability),))
    configuration = resolve(read(config), overrides, profile, [node])
    for stage in configuration.stages():
        if stage.training is not None:
            task = cast("TrainTask", stage.training.task(None))
            yield stage.name, task, stage.training.settings.with_gpus(1)


def train(
    name: str, task: TrainTask, settings: TrainStageSettings, **training: Any
) -> dict[str, Any]:
    """Train two steps and return peaks of memory and counters; ``training`` replaces settings.

    The second step has the optimizer's state, its second micro-batch the gradient of the first.
    """
    build_model = task.build_model
    fixed = {"steps": 2, "epochs": None, "warmup_steps": 0, "log_every": 1}
    given = settings.training.model_copy(update=fixed | training)
    micro = given.micro_batch or 1
    accumulation = min(2, -(-(given.effective_batch or 1) // micro))
    given = given.model_copy(update={"effective_batch": micro * accumulation})
    settings = settings.model_copy(update={"training": given})

    def on_card() -> nn.Module:
        with torch.device("cuda"):  # drawing weights on the host takes longer than the steps
            return build_model()

    task.build_model = on_card  # type: ignore[method-assign]
    os.environ |= expandable_segments()
    torch.linalg.cholesky = torch.clone  # the rig has no cuSOLVER
    torch.backends.cuda.enable_cudnn_sdp(False)  # and no cuDNN
    with tempfile.TemporaryDirectory() as folder:
        plan = BatchPlan(micro, accumulation, micro * accumulation, 1)
        run = RunDirectory.at(folder)
        job = TrainingJob(name, "run", task, settings, plan, run, measured=True)
        return counted(job, Worker(0, torch.device("cuda", 0)))
