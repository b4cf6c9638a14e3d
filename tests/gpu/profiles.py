"""Training stages of the workloads as a profile sets them, on a fake card."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from raypipe.commands.configuration import read, resolve
from raypipe.hardware import Gpu, detect
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.parallel import Worker
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import TrainTask
from tests.gpu.trainings import counted

#: the second step has the optimizer's state, and its second micro-batch the gradient of the first
_STEPS, _ACCUMULATION = 2, 2


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
    """Train two steps and return peaks of memory and counters; ``training`` replaces settings."""
    build_model = task.build_model
    fixed = {"steps": _STEPS, "epochs": None, "warmup_steps": 0, "log_every": 1}
    given = settings.training.model_copy(update=fixed | training)
    micro = given.micro_batch or 1
    accumulation = min(_ACCUMULATION, -(-(given.effective_batch or 1) // micro))
    given = given.model_copy(update={"effective_batch": micro * accumulation})
    settings = settings.model_copy(update={"training": given})

    def on_card() -> nn.Module:
        with torch.device("cuda"):  # drawing weights on the host takes longer than the steps
            return build_model()

    task.build_model = on_card  # type: ignore[method-assign]
    torch.linalg.cholesky = torch.clone  # the rig has no cuSOLVER
    torch.backends.cuda.enable_cudnn_sdp(False)  # and no cuDNN
    with tempfile.TemporaryDirectory() as folder:
        plan = BatchPlan(micro, accumulation, micro * accumulation, 1)
        run = RunDirectory.at(folder)
        job = TrainingJob(name, "run", task, settings, plan, run, measured=True)
        return counted(job, Worker(0, torch.device("cuda", 0)))
