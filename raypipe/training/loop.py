"""The training loop: one function for one CPU, one GPU or many.

A step takes the same samples and gives the same gradient however it is cut into micro-batches
and workers: losses are sums, gradients are added up over micro-batches, averaged over workers
by DDP on the last one only, and divided by the weight of the whole step. Random numbers of the
model (dropout) are keyed by (seed, step, rank), so a resumed run repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from pyarrow import BufferReader
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn.parallel import DistributedDataParallel

from raypipe import faults, results
from raypipe.paths import RunDirectory
from raypipe.training import loader, memory, precision
from raypipe.training.batching import BatchPlan, micro_batches, share
from raypipe.training.checkpoint import Checkpoint, CheckpointStore, on_cpu
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from raypipe.training.task import Loss, Phase, StepContext, TrainTask
from raypipe.training.telemetry import Telemetry
from raypipe.training.throughput import Throughput

#: what becomes of a logged step while the run goes on (a live display); never called per step
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainingJob:
    """A training run as its workers receive it: plain values, picklable."""

    trial_id: str
    run_id: str
    task: TrainTask
    settings: TrainStageSettings
    plan: BatchPlan
    run: RunDirectory
    attempt: int = 1


@dataclass(frozen=True)
class Worker:
    """Which worker of the group this process is, and the device it trains on."""

    rank: int
    device: torch.device


def train(job: TrainingJob, worker: Worker, report: Report | None = None) -> dict[str, Any]:
    """Train to the end, from the newest checkpoint if there is one.

    With several workers the process group is expected to be initialised. Rank 0 writes the
    checkpoints, the ``steps`` rows and, at the end, the model.

    Returns:
        The columns of the ``trials`` table that the run itself knows.

    Raises:
        ValueError: a setting that the device or the task lacks.
        FloatingPointError: the loss is no longer finite.
        torch.OutOfMemoryError: a micro-batch does not fit.

    """
    with Telemetry(job.trial_id, worker.device) as telemetry:
        loop = _Loop(job, worker, report or _ignore)
        outcome = loop.run()
        outcome |= telemetry.summary()
    if telemetry.gpu_samples:
        name = f"{job.trial_id}-{worker.rank}"
        results.write_table(job.run, "gpu_samples", telemetry.gpu_samples, job.run_id, name)
    return outcome


def learning_rate(training: TrainingSettings, phase: Phase, step: int) -> float:
    """The learning rate of a phase's step, counted from 0: linear warm-up, then the schedule."""
    warmup = min(training.warmup_steps, phase.steps)
    if step < warmup:
        return phase.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, phase.steps - warmup)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[training.schedule]
    return phase.learning_rate * factor


class _LossModule(nn.Module):
    """Model and loss as one module, so that DDP sees one forward a micro-batch."""

    def __init__(self, task: TrainTask, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Any, context: StepContext) -> Loss:
        return self.task.loss(self.model, batch, context)


class _Loop:
    def __init__(self, job: TrainingJob, worker: Worker, report: Report) -> None:
        self.job, self.worker, self.report = job, worker, report
        self.training = job.settings.training
        self.faults = faults.from_environment()
        precision.check(self.training.precision, worker.device)
        if job.settings.scaling.strategy != "ddp":
            raise ValueError(
                f"scaling.strategy = {job.settings.scaling.strategy}: is not available yet; use ddp"
            )
        precision.configure(self.training.precision)

        torch.manual_seed(self.training.seed)
        self.model = job.task.build_model().to(worker.device)
        if self.training.gradient_checkpointing:
            _recompute(job.task, self.model)
        self.phases = job.task.phases(self.training, job.plan.effective_batch)
        _check_phases(self.phases, job.plan.workers)
        self.optimizer = _optimizer(self.model, self.training, worker.device)
        self.scaler = precision.scaler(self.training.precision, worker.device)
        self.store = CheckpointStore(job.run, job.trial_id, self.training.keep_checkpoints)
        self.rows: list[dict[str, Any]] = []
        self.start = self._resume()
        self.module = self._wrap()
        self.throughput = Throughput()

    def run(self) -> dict[str, Any]:
        total = sum(phase.steps for phase in self.phases)
        every = self.training.checkpoint_every or max(1, total // 10)
        batches = self._batches()
        self.module.train()
        self.throughput.start()
        for step, phase, phase_step in _steps(self.phases, self.start):
            rate = learning_rate(self.training, phase, phase_step)
            stats = self._step(step, phase, rate, batches)
            done = step + 1
            evaluating = self.training.eval_every and done % self.training.eval_every == 0
            self.throughput.count(phase.samples)
            if done % self.training.log_every == 0 or evaluating or done == total:
                self._log(done, phase, rate, stats, evaluate=bool(evaluating or done == total))
            if done % every == 0 or done == total:
                self._save(done)
        return self._finish(total)

    def _step(
        self, step: int, phase: Phase, rate: float, batches: Iterator[Any]
    ) -> dict[str, Tensor]:
        """One optimiser step; the sums of loss, weight and metrics over all workers."""
        workers, rank = self.job.plan.workers, self.worker.rank
        # each phase keeps the micro-batch; a smaller phase takes fewer of them
        mine = share(phase.samples, workers, rank)
        parts = list(micro_batches(mine, self.job.plan.micro_batch))
        torch.manual_seed((self.training.seed * 1_000_003 + step) * 4096 + rank)
        context = StepContext(step, phase, self.training.seed)
        sums: dict[str, Tensor] = {}
        for number, part in enumerate(parts, start=1):
            self.faults.at_step(step, len(part), rank, self.job.attempt)
            last = number == len(parts)
            with self._synchronised(last):
                with precision.autocast(self.training.precision, self.worker.device):
                    loss = self.module(next(batches), context)
                # a constant divisor keeps fp16 in range; the true weight follows below
                self.scaler.scale(loss.total / phase.samples).backward()
            _add(sums, loss, self.worker.device)
        if workers > 1:
            names = sorted(sums)
            packed = torch.stack([sums[name] for name in names])
            dist.all_reduce(packed)
            sums = dict(zip(names, packed.unbind(), strict=True))
        self._update(rate, phase.samples * workers / sums["weight"])
        return sums

    def _synchronised(self, last: bool) -> Any:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def _update(self, rate: float, scale: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _log(
        self, step: int, phase: Phase, rate: float, sums: dict[str, Tensor], *, evaluate: bool
    ) -> None:
        weight = sums["weight"].item()  # the only place that waits for the device
        row: dict[str, Any] = {
            name: value.item() / weight for name, value in sums.items() if name != "weight"
        }
        if not (math.isfinite(row["loss"]) or self.scaler.is_enabled()):  # fp16 skips such steps
            raise FloatingPointError(
                f"the loss is {row['loss']} at step {step}; lower training.learning_rate or set "
                "training.clip_norm"
            )
        self.throughput.stop()
        row |= {
            "trial_id": self.job.trial_id,
            "step": step,
            "lr": rate,
            "phase": phase.name,
            "samples_per_s": self.throughput.latest,
        }
        if evaluate:
            self.model.eval()
            with torch.no_grad():
                measures = self.job.task.evaluate(self.model, self.worker.device)
            self.model.train()
            row |= {f"eval_{name}": value for name, value in measures.items()}
        self.rows.append(row)
        if self.worker.rank == 0:
            self.report(row)
        self.throughput.start()

    def _save(self, step: int) -> None:
        self.throughput.pause()
        if self.worker.rank == 0:
            job = self.job
            results.write_table(job.run, "steps", self.rows, job.run_id, job.trial_id)
            checkpoint = Checkpoint(
                step=step,
                model=self.model.state_dict(),
                optimizer=self.optimizer.state_dict(),
                scaler=self.scaler.state_dict(),
            )
            self.store.save(checkpoint)
        self.throughput.resume()

    def _resume(self) -> int:
        checkpoint = self.store.newest()
        if checkpoint is None:
            return 0
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.scaler.load_state_dict(checkpoint.scaler)
        path = self.job.run.partition("steps", self.job.trial_id)
        if self.worker.rank == 0 and self.job.run.exists(path):
            stored = pq.read_table(BufferReader(self.job.run.read(path))).drop(["run_id"])
            self.rows = [row for row in stored.to_pylist() if row["step"] <= checkpoint.step]
        return checkpoint.step

    def _wrap(self) -> nn.Module:
        if self.training.compile:
            self.model.compile()
        module = _LossModule(self.job.task, self.model)
        if self.job.plan.workers == 1:
            return module
        ids = [self.worker.device.index] if self.worker.device.type == "cuda" else None
        return DistributedDataParallel(
            module,
            device_ids=ids,
            find_unused_parameters=self.job.task.unused_parameters,
            broadcast_buffers=False,
        )

    def _batches(self) -> Iterator[Any]:
        dataset = self.job.task.build_dataset()
        sampler = loader.MicroBatchSampler(
            self.phases,
            len(dataset),  # type: ignore[arg-type]
            shuffle=self.job.task.shuffle,
            seed=self.training.seed,
            micro_batch=self.job.plan.micro_batch,
            rank=self.worker.rank,
            workers=self.job.plan.workers,
            first_step=self.start,
        )
        settings = self.job.settings.loader
        return loader.batches(self.job.task, dataset, sampler, settings, self.worker.device)

    def _finish(self, total: int) -> dict[str, Any]:
        if self.worker.rank == 0:
            weights = on_cpu(self.model.state_dict())
            content = save_tensors(weights, metadata=dict(self.job.task.metadata()))
            self.job.run.write(self.job.run.model(self.job.trial_id), content)
        rate, step_time = self.throughput.mean()
        last = self.rows[-1] if self.rows else {}
        return {
            "steps": total,
            "loss_final": last.get("loss"),
            "samples_per_s": rate,
            "step_time_s": step_time,
            "gpu_peak_bytes": memory.gpu_peak_bytes(self.worker.device),
            "host_peak_bytes": memory.host_peak_bytes(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **{key: value for key, value in last.items() if key.startswith("eval_")},
        }


def _steps(phases: Any, start: int) -> Iterator[tuple[int, Phase, int]]:
    """(step of the run, phase, step of the phase) from a step on, counted from 0."""
    inside = chain.from_iterable(((phase, n) for n in range(phase.steps)) for phase in phases)
    for step, (phase, phase_step) in enumerate(inside):
        if step >= start:
            yield step, phase, phase_step


def _check_phases(phases: Sequence[Phase], workers: int) -> None:
    for phase in phases:
        if phase.samples < workers:
            raise ValueError(
                f"phase {phase.name}: {phase.samples} samples a step are less than one for each of "
                f"scaling.workers = {workers}"
            )


def _recompute(task: TrainTask, model: nn.Module) -> None:
    """Activation checkpointing (Chen et al. 2016) of the modules that the task names."""
    chosen = set(task.checkpointed_modules(model))
    if not chosen:
        raise ValueError(
            "training.gradient_checkpointing = true: this task names no modules to recompute "
            "(TrainTask.checkpointed_modules)"
        )
    apply_activation_checkpointing(model, check_fn=chosen.__contains__)


def _optimizer(
    model: nn.Module, training: TrainingSettings, device: torch.device
) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(
        model.parameters(),
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=device.type == "cuda" or None,
    )


def _add(sums: dict[str, Tensor], loss: Loss, device: torch.device) -> None:
    weight = torch.as_tensor(loss.weight, device=device, dtype=torch.float64)
    for name, value in {"loss": loss.total, "weight": weight, **loss.metrics}.items():
        value = value.detach().double()
        sums[name] = sums[name] + value if name in sums else value


def _ignore(row: dict[str, Any]) -> None:
    del row
