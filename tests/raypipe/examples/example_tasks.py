"""Small training tasks in float64, and the loop they are compared with."""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

import raypipe as rp
from raypipe.store.tables import read_table
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import LoaderSettings, ScalingSettings

SAMPLES, WIDTH = 50, 5


class Points(Dataset[dict[str, Tensor]]):
    """Sample ``i``: a point, a target, and a weight between 1 and 7 (its tokens)."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
        self.y = torch.randn(samples, generator=generator, dtype=torch.float64)
        self.tokens = torch.arange(samples) % 7 + 1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "y": self.y[i], "tokens": self.tokens[i], "id": torch.tensor(i)}


@dataclass(kw_only=True, eq=False)
class Regression(rp.TrainTask):
    """A small network; ``by_token`` weighs each sample by its tokens, each pass has a pause."""

    by_token: bool = False
    dropout: float = 0.0
    tied: bool = False
    dtype: torch.dtype = torch.float64
    samples: int = SAMPLES
    fail_at: int | None = None
    nan_at: int | None = None
    pause_s: float = 0.0
    shuffle: bool = True

    def build_model(self) -> nn.Module:
        hidden = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(self.dropout)]
        more = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        if self.tied:
            more[0].weight = hidden[0].weight
        model = nn.Sequential(*hidden, *more, nn.Linear(WIDTH, 1))
        return model.to(self.dtype)

    def build_dataset(self) -> Dataset[Any]:
        return Points(self.samples)

    def loss(self, model: nn.Module, batch: Any, context: rp.StepContext) -> rp.Loss:
        if context.step == self.fail_at:
            raise ConnectionError("the machine went away")
        if self.pause_s:
            time.sleep(self.pause_s)
        error = model(batch["x"].to(self.dtype)).squeeze(1).double()
        each = F.mse_loss(error, batch["y"], reduction="none")
        if context.step == self.nan_at:
            each = each * torch.nan
        weights = batch["tokens"].double() if self.by_token else torch.ones_like(each)
        metrics = {"mae": ((error - batch["y"]).abs() * weights).sum()}
        return rp.Loss((each * weights).sum(), weights.sum(), metrics)

    def evaluate(self, model: nn.Module, device: Any, batch_size: int) -> Mapping[str, float]:
        torch.rand(3)  # an evaluation may draw; training must not notice
        points = Points(8)
        out = model(points.x.to(self.dtype)).squeeze(1)
        return {"mse": float(F.mse_loss(out, points.y.to(self.dtype)))}

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return (model[2], model[3])


class HeldOut(Regression):
    """With an evaluation set of 11 further points, beside the measure of its own."""

    def build_eval_dataset(self) -> Dataset[Any]:
        return Subset(Points(SAMPLES + 11), range(SAMPLES, SAMPLES + 11))


class TwoPhases(Regression):
    """Another batch size and learning rate from step 4 on, as PABBO has."""

    def phases(self, training: rp.TrainingSettings, effective_batch: int) -> Sequence[rp.Phase]:
        return [rp.Phase("first", 4, effective_batch, 1e-2), rp.Phase("second", 3, 5, 1e-3)]


class TwoHeads(TwoPhases):
    """A head that gets no gradient in the first phase, and then is the only one that does."""

    unused_parameters = True

    def build_model(self) -> nn.Module:
        body = super().build_model()
        heads = {"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)}
        return nn.ModuleDict({"body": body, **heads}).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any, context: rp.StepContext) -> rp.Loss:
        assert isinstance(model, nn.ModuleDict)
        both = nn.Sequential(model["body"], model[context.phase.name])
        return super().loss(both, batch, context)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        return ()

    def evaluate(self, model: nn.Module, device: Any, batch_size: int) -> Mapping[str, float]:
        return {}


def job(
    task: rp.TrainTask,
    folder: Path,
    plan: tuple[int, int, int, int] = (16, 1, 16, 1),
    *,
    loader: LoaderSettings | None = None,
    strategy: Any = "ddp",
    **training: Any,
) -> TrainingJob:
    """A job of ``(micro_batch, accumulation, effective_batch, workers)``."""
    given = {"steps": 7, "log_every": 1, "learning_rate": 1e-2, **training}
    settings = rp.TrainStageSettings(
        training=rp.TrainingSettings(**given),
        scaling=ScalingSettings(workers=plan[3], strategy=strategy),
        loader=loader or LoaderSettings(),
    )
    run = rp.RunDirectory.at(folder)
    return TrainingJob("fit", "run-1", task, settings, BatchPlan(*plan), run)


def outcome(job: TrainingJob) -> tuple[list[float], dict[str, Tensor]]:
    """The logged losses, of which each step has one, and the stored weights."""
    steps = read_table(job.run_dir, "steps")
    assert list(steps["step"]) == list(range(1, len(steps) + 1))
    return list(steps["loss"]), weights(job)


def weights(job: TrainingJob) -> dict[str, Tensor]:
    return load(job.run_dir.read(job.run_dir.model(job.trial_id)))


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Weights are the same to the last bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rel: float) -> None:
    """Weights differ by a small part of their norm."""
    assert found.keys() == expected.keys()
    difference = math.sqrt(sum(float((found[k] - expected[k]).square().sum()) for k in expected))
    norm = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    assert difference <= rel * norm


def by_hand(job: TrainingJob) -> tuple[list[tuple[float, float, float, str]], dict[str, Tensor]]:
    """Run the same steps with one big batch each, written out.

    Return the loss, the norm of the gradient, the rate and the phase of each step, and the weights.
    """
    training, task = job.settings.training, job.task
    torch.manual_seed(training.seed)
    model = task.build_model()
    points = task.build_dataset()
    given: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if training.optimizer == "adafactor":
        optimizer: Any = torch.optim.Adafactor(model.parameters(), **given)
    else:
        kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
        optimizer = kind(model.parameters(), betas=training.betas, **given)
    if type(task).optimizer is not rp.TrainTask.optimizer:
        optimizer = task.optimizer(model, training)
    factors = [group["lr"] / training.learning_rate for group in optimizer.param_groups]
    rows, position = [], 0
    for phase in task.phases(training, job.plan.effective_batch):
        for phase_step in range(phase.steps):
            positions = range(position, position + phase.samples)
            position += phase.samples
            drawn = [points[sample_at(p, task, training.seed)] for p in positions]
            batch = default_collate(drawn)
            loss = task.loss(model, batch, rp.StepContext(len(rows), phase, training.seed))
            value = loss.total / loss.weight
            optimizer.zero_grad()
            value.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm or math.inf)
            rate = task.learning_rate(training, phase, phase_step)
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                group["lr"] = factor * rate
            optimizer.step()
            rows.append((value.item(), norm.item(), rate, phase.name))
    return rows, model.state_dict()


def sample_at(position: int, task: rp.TrainTask, seed: int) -> int:
    samples = len(task.build_dataset())  # type: ignore[arg-type]
    epoch, offset = divmod(position, samples)
    if not task.shuffle:
        return offset
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return int(torch.randperm(samples, generator=generator)[offset])


@contextmanager
def worker_group(workers: int, folder: Path) -> Iterator[Callable[..., list[Any]]]:
    """Start a group of processes once, for many functions.

    What it yields calls ``member(rank, *arguments)`` in each of them, and returns their results by
    rank. After an error in one of them the group has ended.
    """
    forked = get_context("forkserver")  # a process that imported once what all need
    forked.set_forkserver_preload(["experiments.lm_pretrain.training", "raypipe.training.loop"])
    ranks = forked.SimpleQueue()
    for rank in range(workers):
        ranks.put(rank)
    with ProcessPoolExecutor(workers, forked, _join, (ranks, workers, folder)) as pool:

        def call(member: Callable[..., Any], *arguments: Any) -> list[Any]:
            ended = [pool.submit(_call, member, arguments) for _ in range(workers)]
            return [result for _, result in sorted(each.result() for each in ended)]

        yield call
        with suppress(BrokenProcessPool):  # they are gone
            for _ in range(workers):  # sharded models that outlive the group abort a usual end
                pool.submit(os._exit, 0)


def _join(ranks: SimpleQueue[int], workers: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda file: None  # as in the process of the tests
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=ranks.get(), world_size=workers)


def _call(member: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, Any]:
    """Call a function in one process; all end together, so that each takes one call."""
    gc.freeze()  # each training collects garbage: not among what is imported
    try:
        result = member(dist.get_rank(), *arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others may wait for this one
    return dist.get_rank(), result
