"""The model of a worker: built, initialized, compiled, and distributed over the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raypipe.training import compilation, parallel, precision
from raypipe.training.job import Report, TrainingJob, Worker
from raypipe.training.task import Loss, TrainTask
from raypipe.training.undrawn import Undrawn


class Replica(NamedTuple):
    """A model; the module that computes with it, on its device; and the loss that the module takes.

    ``model`` shares its weights with ``module``.
    """

    model: nn.Module
    module: parallel.ModelCall | DistributedDataParallel
    loss: Callable[..., Loss]


def build(job: TrainingJob, worker: Worker, report: Report) -> Replica:
    """Return the model of a job on this worker, with the same initial weights on all workers.

    Raises:
        ValueError: a setting needs blocks and the task defines none, or unsuitable ones.
        ConfigError: the weights of ``training.init_from`` do not fit.

    """
    task, training = cast("TrainTask", job.task), job.settings.training
    sharded = parallel.is_sharded(job.settings, worker)
    model = _initialized(task, training.seed, worker, sharded=sharded)
    if job.initial is not None:
        job.initial.load_into(model)
    precision.store(model, training.weights)
    if training.precision == "fp8":
        precision.to_float8(model, task.blocks(model))
    if warning := parallel.batch_norm_warning(model, job.plan.for_workers(worker.workers)):
        report(f"WARNING: {warning}")
    loss = task.loss
    if training.compile and task.compile_loss:
        loss = compilation.compiled(task.loss, training.compile_mode)
    return Replica(model, parallel.wrap(model, task, job.settings, worker), loss)


def _initialized(task: TrainTask, seed: int, worker: Worker, *, sharded: bool) -> nn.Module:
    """Return the newly initialized model on the CPU.

    Only rank 0 draws weights, on one thread. The others receive them: from DDP, or here if the
    model is sharded. All of them leave with rank 0's state of the generator.
    """
    torch.manual_seed(seed)
    if worker.rank == 0:
        model = task.build_model()
    else:
        before = torch.get_rng_state()
        with Undrawn() as undrawn:
            model = task.build_model()
        if undrawn.were_used or not torch.equal(torch.get_rng_state(), before):
            torch.manual_seed(seed)
            model = task.build_model()
    if worker.workers == 1:
        return model
    for each in model.parameters() if sharded else ():
        dist.broadcast(whole := each.detach().to(worker.device), src=0)
        if worker.rank:
            each.data.copy_(whole)
    state = torch.get_rng_state().to(worker.device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())
    return model
