"""Predicted peaks beside what torch's allocator for the CPU hands out in the real training loop."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from example_tasks import worker_group
from torch.profiler import ProfilerActivity, profile

from raypipe.cards.dry_run import StepCase, record
from raypipe.cards.recorder import Recording
from raypipe.commands.configuration import read, resolve
from raypipe.hardware import detect
from raypipe.store.run_directory import RunDirectory
from raypipe.study.sweep import training_stage
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import TrainTask

#: a small preset of each workload, its training stage and a micro-batch
WORKLOADS = {
    "lm_pretrain": (["data.source=random"], "train", 12),
    "summarization": ([], "train", 4),
    "transformer": (["data.source=random", "model.numeric=8"], "train", 32),
    "teleclass": (["train.classifier.layers=2"], "train", 16),
    "pabbo_lda": (["train_small.pabbo.horizon=4"], "train_small", 8),
}
FAST = "summarization"


def of_workload(name: str) -> tuple[TrainTask, TrainStageSettings, int]:
    overrides, stage, size = WORKLOADS[name]
    configuration = resolve(read(name), overrides, "cpu", [detect()])
    _, training = training_stage(configuration.stages(), stage, "test")
    task = training.task(None)
    assert isinstance(task, TrainTask)
    return task, training.settings, size


def of_step(
    settings: TrainStageSettings, plan: BatchPlan, *, checkpointing: bool
) -> TrainStageSettings:
    return settings.changed(
        "training", steps=2, epochs=None, warmup_steps=0, compile=False,
        micro_batch=plan.micro_batch, accumulation=plan.accumulation,
        effective_batch=plan.effective_batch, gradient_checkpointing=checkpointing,
    )  # fmt: skip


def predicted(task: TrainTask, settings: TrainStageSettings, plan: BatchPlan) -> int:
    """The largest sum of the sizes of tensors that live at a time, in any phase."""
    peaks = []
    for number, phase in enumerate(task.phases(settings.training, plan.effective_batch)):
        size = min(plan.micro_batch, phase.samples)
        runs = min(2, -(-phase.samples // plan.workers // size))
        case = StepCase(settings, phase, number, size, runs, plan.workers, None)
        peaks.append(most(record(task, case)))
    return max(peaks)


def most(recording: Recording) -> int:
    sizes, changes = dict[int, int](), list[int]()
    for number, size in recording.events:
        changes.append(size or -sizes[number])
        sizes[number] = size
    return max(accumulate(changes))


def measured(
    task: TrainTask, settings: TrainStageSettings, plan: BatchPlan, folder: Path, rank: int = 0
) -> int:
    """The largest number of bytes that the allocator had handed out, in a run of the loop."""
    job = TrainingJob("t", "r", task, settings, plan, RunDirectory.at(folder), measured=True)
    worker = Worker(rank, torch.device("cpu"), plan.workers)
    gc.collect()  # what earlier trainings left must not be freed among this one's events
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train(job, worker)
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


def cases() -> Sequence[object]:
    found = []
    for name in WORKLOADS:
        for checkpointing in (False, True) if name != "pabbo_lda" else (False,):
            for accumulation in (1, 2):
                fast = name == FAST and not checkpointing and accumulation == 2
                slow = [] if fast else [pytest.mark.slow]
                found.append(pytest.param(name, checkpointing, accumulation, marks=slow))
    return found


@pytest.mark.parametrize(("name", "checkpointing", "accumulation"), cases())
def test_the_predicted_peak_is_what_the_allocator_hands_out(
    name: str, checkpointing: bool, accumulation: int, tmp_path: Path
) -> None:
    task, settings, size = of_workload(name)
    plan = BatchPlan(size, accumulation, size * accumulation, 1)
    own = of_step(settings, plan, checkpointing=checkpointing)
    found = measured(task, own, plan, tmp_path)
    assert predicted(task, own, plan) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == FAST else pytest.mark.slow) for name in WORKLOADS],
)
def test_recorded_operations_are_those_of_the_analytic_count(name: str) -> None:
    task, settings, size = of_workload(name)
    plan = BatchPlan(size, 1, size, 1)
    own = of_step(settings, plan, checkpointing=False)
    phase = task.phases(own.training, size)[0]
    analytic = task.flops_per_sample(task.build_model())
    if analytic is None:
        pytest.skip("the task does not count its operations")
    case = StepCase(own, phase, 0, size, 1, 1, 9.0)
    assert record(task, case).flops / size == pytest.approx(analytic, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("workers", [2, 4])
def test_the_peak_of_a_shard_is_what_the_allocator_hands_out(
    workers: int, accumulation: int, tmp_path: Path
) -> None:
    plan = sharded_plan(workers, accumulation)
    with worker_group(workers, tmp_path) as call:
        found = call(peak_of_shard, plan, tmp_path / "run")
    assert predicted(*sharded(plan), plan) == pytest.approx(max(found), rel=0.03)


def sharded_plan(workers: int, accumulation: int) -> BatchPlan:
    # gloo copies what it reduces, and NCCL does not: 2 to 4 MB here at any size, next to 220 MB
    size = 64
    return BatchPlan(size, accumulation, size * accumulation * workers, workers)


def sharded(plan: BatchPlan) -> tuple[TrainTask, TrainStageSettings]:
    task, settings, _ = of_workload("lm_pretrain")
    own = of_step(settings, plan, checkpointing=False)
    return task, own.changed("scaling", workers=plan.workers, strategy="fsdp")


def peak_of_shard(rank: int, plan: BatchPlan, folder: Path) -> int:
    return measured(*sharded(plan), plan, folder, rank)
