"""Training loop for one CPU, one GPU or many GPUs.

A step has the same samples and the same gradient for any micro-batch and number of workers.
Losses are sums. Gradients are accumulated over micro-batches, exchanged between the workers, and
divided by the weight of the whole step. Replicated models exchange on the last micro-batch only.
Random numbers of the model (dropout) are keyed by (seed, step, rank), so a resumed run repeats
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import torch
from torch import Tensor

from raypipe import faults
from raypipe.errors import BatchLimit, UnitError
from raypipe.training import failure_kinds, loader, model, parallel, precision, telemetry
from raypipe.training.batching import BatchPlan, micro_batches
from raypipe.training.checkpoint import (
    Checkpoint,
    CheckpointStore,
    gathered,
    load_state,
    model_state,
)
from raypipe.training.data_sheets import peak_flops
from raypipe.training.early_stopping import Monitor
from raypipe.training.ending import Agreement, Ending
from raypipe.training.history import History, Throughput
from raypipe.training.job import ExternalTask, Report, TrainingJob, schedule_trace
from raypipe.training.keyed_random import seed_all
from raypipe.training.loss_check import refuse_means
from raypipe.training.optimizer import Update
from raypipe.training.parallel import Worker
from raypipe.training.recovery import lost_state
from raypipe.training.schedule import Phase, steps
from raypipe.training.task import Loss, StepContext, TrainTask, add_loss
from raypipe.training.telemetry import Telemetry
from raypipe.training.weights import write_weights

#: seconds of work that a restart may lose, unless ``checkpoint_every`` is given
SAVE_S = 10.0


def lone_worker(job: TrainingJob) -> Worker:
    """Return the worker of a job that needs only one, on the process's GPU or on the CPU.

    Raises:
        UnitError: the job uses a GPU, and CUDA does not start.

    """
    if not job.settings.scaling.gpus_per_worker:
        return Worker(0, torch.device("cpu"))
    os.environ.update(failure_kinds.expandable_segments())
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = f"CUDA does not start: {error}; `raypipe doctor` shows the GPUs"
        raise UnitError(job.trial_id, "error", reason) from error
    return Worker(0, torch.device("cuda", 0))


def train(
    job: TrainingJob,
    worker: Worker,
    report: Report | None = None,
    ending: Ending | None = None,
) -> dict[str, Any]:
    """Train to completion, from the newest checkpoint if there is one.

    With several workers, each one calls this after the process group was initialized. Rank 0 writes
    checkpoints, ``steps``, the model. If its ``ending`` is wanted, all save a checkpoint and end.

    Returns:
        The columns of ``trials`` that it determines; and ``ended_at``, the step of an early end.

    Raises:
        ValueError: the device or the task does not support a setting.
        FloatingPointError: the loss is no longer finite.
        torch.OutOfMemoryError: a batch exceeds the memory.

    """
    if isinstance(job.task, ExternalTask):
        return job.task.run(job, report or _ignore, ending or Ending())
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
    with Telemetry(job.trial_id, worker.device, rank=worker.rank, attempt=job.attempt) as sampler:
        loop = _Loop(job, worker, report or _ignore, sampler, ending or Ending())
        try:
            outcome = loop.run()
        finally:
            loop.store_rows()
        summaries = parallel.gather(sampler.summary(), worker.workers)
    return outcome | loop.speed() | telemetry.combine(summaries)


class _Loop:
    def __init__(
        self, job: TrainingJob, worker: Worker, report: Report, sampler: Telemetry, ending: Ending
    ) -> None:
        self.job, self.worker, self.sampler = job, worker, sampler
        self.agreement = Agreement(ending, worker)
        self.settings = job.settings
        self.report = report if worker.rank == 0 else _ignore
        self.task, self.training = cast("TrainTask", job.task), job.settings.training
        self.plan: BatchPlan = job.plan.for_workers(worker.workers)
        self.faults = faults.from_environment()
        precision.check(self.training.precision, worker.device)
        precision.configure(self.training.precision)
        self.phases = job.phases
        self.sharded = parallel.is_sharded(job.settings, worker)
        for phase in self.phases:
            if phase.samples < self.plan.workers:
                raise ValueError(
                    f"phase {phase.name}: {phase.samples} samples per step are less than one for "
                    f"each of scaling.workers = {self.plan.workers}"
                )
        self.trace = schedule_trace(job, self.phases)
        self.model, self.module, self.loss = model.build(job, worker, self.report)
        optimizer = self.task.optimizer(self.model, self.training)
        self.update = Update(self.model, optimizer, self.training, worker.device)
        self.interval_weight = torch.zeros((), dtype=torch.float64, device=worker.device)
        self.held_out = self.task.build_eval_dataset()
        self.monitor = Monitor(job, has_held_out=self.held_out is not None)
        self.store = CheckpointStore(job.run_dir, job.trial_id, self.training.keep_checkpoints)
        self.history = History(job, self.report, tolerate_overflow=self.update.skips_overflows)
        self.throughput = Throughput(worker.device)
        self.start = self._resume()
        self.saved_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        total = self.job.steps
        save_every = self.training.checkpoint_every or max(1, total // 10)
        step, over, ends = self.start, self._is_over(), False
        if (given := self.training.steps) is not None and self.job.whole < given:
            self.report(f"{self.job.whole} steps: the task limits training.steps = {given}")
        # the state after the last step of the whole training is only for further ones
        keeps = self.training.keep_state or total < self.job.whole
        self.module.train()
        data = loader.batches(
            self.task,
            self.phases,
            self.settings,
            self.plan,
            self.worker,
            self.start,
            measured=self.job.measured,
        )
        with closing(data) as batches:
            for number, phase, phase_step, _ in steps(self.phases, self.start):
                if over or ends or number == total:
                    break
                step = number + 1
                last = step == total
                evaluate = last or self.monitor.is_evaluated(step)
                log = evaluate or step % self.training.log_every == 0
                self.throughput.start()
                rate = self.task.learning_rate(self.training, phase, phase_step)
                sums = self._step(number, phase, rate, batches, log=log)
                ends = self.agreement.reached(sums)
                self.throughput.count(phase.samples)
                if log:
                    self._log(step, phase, rate, sums)
                if self.job.measured:
                    continue
                if evaluate:
                    over = self._evaluate(step, phase)
                due = keeps if last else step % save_every == 0
                if over or ends or (due and self._saves(last)):
                    self._save(step)
        return self._finish(step, early=ends and not over and step < total)

    def _step(
        self, step: int, phase: Phase, rate: float, batches: Iterator[Any], *, log: bool
    ) -> dict[str, Tensor]:
        """Run one optimizer step.

        Return the sums over all workers: the weight and, with ``log``, all logged values.
        """
        workers, rank = self.plan.workers, self.worker.rank
        # every phase uses the same micro-batch; a phase with fewer samples has fewer of them
        runs = micro_batches(phase.samples, workers, rank, self.plan.micro_batch)
        # FSDP needs all workers in each forward pass: an empty one repeats an uncounted batch
        parts = runs if self.sharded else [run for run in runs if run]
        seed_all((self.training.seed * 1_000_003 + step) * 4096 + rank, self.worker.device)
        context = StepContext(step, phase, self.training.seed)
        sums: dict[str, Tensor] = {}
        batch: Any = None
        for number, part in enumerate(parts, start=1):
            counted, size = bool(part), max(1, len(part))
            before = time.perf_counter()
            if counted:
                batch = next(batches)
            self.throughput.waited(time.perf_counter() - before)
            with failure_kinds.fitting(BatchLimit("training", size)):
                self.faults.at_step(step, size, rank, self.job.attempt)
                exchange = number == len(parts)
                loss = self._forward_backward(
                    batch, size, context, exchange=exchange, counted=counted
                )
            add_loss(sums, loss, self.worker.device, counted=counted, weight_only=not log)
            if step == self.start and number == 1 and not (self.sharded or self.job.measured):
                self.throughput.pause()
                device = self.worker.device
                refuse_means(self.task, self.training, device, self.module, batch, size, context)
                self.throughput.start()
        self.agreement.ask(sums)
        sums = parallel.all_reduce(sums, workers)
        self.interval_weight += sums["weight"]
        norm = self.update.step(rate, phase.samples / sums["weight"], norm=log)
        return sums if norm is None else sums | {"grad_norm": norm}

    def _forward_backward(
        self, batch: Any, size: int, context: StepContext, *, exchange: bool, counted: bool
    ) -> Loss:
        device, recompute = self.worker.device, self.training.gradient_checkpointing
        with parallel.gradient_sync(self.module, exchange):
            with precision.autocast(self.training.precision, device, recompute=recompute):
                loss: Loss = self.module(self.loss, batch, context)
            if self.update.needs_scale:
                self.update.choose_scale(
                    parallel.from_rank_0(float(loss.weight) / size, self.worker)
                )
            # the update applies the weight of the step once it is known; the exchange averages
            self.update.backward(loss.total * (counted * self.plan.workers / context.phase.samples))
        return loss

    def _log(self, step: int, phase: Phase, rate: float, sums: dict[str, Tensor]) -> None:
        row = {"trial_id": self.job.trial_id, "step": step, "lr": rate, "phase": phase.name}
        interval = self.throughput.cut()
        if len(self.throughput.intervals) == 1:
            self.sampler.steady()
        self.history.note(row, sums | {"interval_weight": self.interval_weight}, interval)
        self.interval_weight = torch.zeros_like(self.interval_weight)

    def _evaluate(self, step: int, phase: Phase) -> bool:
        """Evaluate on held-out data and keep the best model. Return whether the run should end."""
        self.throughput.pause()
        self.history.settle(self._measures(StepContext(step, phase, self.training.seed)))
        rows = self.history.rows
        best = parallel.from_rank_0(self.monitor.best(rows), self.worker)
        if best is not None and best.step == step:
            weights = model_state(self.model)
            if self.worker.rank == 0:
                kept = [self.monitor.best(rows, until) for until in (*self.store.steps, step)]
                self.store.save_best(weights, step, [each.step for each in kept if each])
        if best is None or not self._is_over():
            return False
        self.report(f"stopped at step {step}: no better {best.metric} since step {best.step}")
        return True

    def _measures(self, context: StepContext) -> dict[str, float]:
        """Return the mean loss and metrics over the held-out data, and the task's own measures.

        The workers share the held-out samples.
        """
        size = self.job.eval_batch or self.training.eval_batch or self.plan.micro_batch
        device, precise = self.worker.device, self.training.precision
        sums: dict[str, Tensor] = {}
        measures: dict[str, float] = {}
        with (
            parallel.evaluating(self.module) as call,
            failure_kinds.fitting(BatchLimit("evaluation", size)),
            precision.autocast(precise, device),
        ):
            if self.held_out is not None:
                given = self.task, self.held_out, size, self.worker, self.settings.loader
                with closing(loader.eval_batches(*given)) as batches:
                    for batch, counted in batches:
                        loss: Loss = call(self.task.loss, batch, context)
                        # a worker without samples left takes part: FSDP gathers weights from all
                        add_loss(sums, loss, device, counted=counted)
                sums = parallel.all_reduce(sums, self.worker.workers)
                weight = sums.pop("weight").item()
                measures = {name: value.item() / weight for name, value in sums.items()}
            measures |= call(self.task.evaluate, device, size)
        return measures

    def _is_over(self) -> bool:
        """Whether the training stops early, or a resumed one had already stopped."""
        return bool(parallel.from_rank_0(self.monitor.is_over(self.history.rows), self.worker))

    def _saves(self, last: bool) -> bool:
        """Whether to save now: by default only if a restart would lose seconds of work."""
        if last or self.training.checkpoint_every is not None:
            return True
        return bool(parallel.from_rank_0(time.monotonic() > self.saved_at + SAVE_S, self.worker))

    def _save(self, step: int) -> None:
        self.throughput.pause()
        self.history.settle()  # a non-finite loss ends the run before the checkpoint
        self.store_rows()  # before the checkpoint, so that a resumed run has them
        contents = gathered(self.model, self.update.optimizer)
        if self.worker.rank == 0:
            scaler = self.update.scaler_state()
            self.store.save(Checkpoint(step, *contents, scaler, self.trace(step)))
        self.saved_at = time.monotonic()

    def _resume(self) -> int:
        """Restore the newest checkpoint; return its step, or 0 without one. All workers call it."""
        checkpoint = self._newest() if self.worker.rank == 0 and not self.job.measured else None
        step = parallel.from_rank_0(checkpoint and checkpoint.step, self.worker)
        if step is None:
            return 0
        self._restore(checkpoint)
        self.report(f"continues from step {step} of {self.job.steps} (checkpoint)")
        return int(step)

    def _newest(self) -> Checkpoint | None:
        """Return the newest checkpoint of this training; only rank 0 reads.

        Raises:
            ValueError: there is none, and the training continues a finished one.

        """
        checkpoint = self.store.newest(lambda text: self.report(f"WARNING: {text}"), self.trace)
        if checkpoint is None and self.job.continues:
            raise ValueError(lost_state(self.job))
        return checkpoint

    def _restore(self, read: Checkpoint | None) -> None:
        """Restore what rank 0 has read; the others receive their parts, in less memory."""
        scaler = parallel.from_rank_0(read and read.scaler, self.worker)
        weights, optimizer = (read.model, read.optimizer) if read is not None else ({}, {})
        load_state(self.model, self.update.optimizer, weights, optimizer, self.worker)
        self.update.load_scaler_state(scaler)
        if read is not None:
            self.history.restore(read.step)

    def _finish(self, step: int, *, early: bool) -> dict[str, Any]:
        self.throughput.pause()
        self.history.settle()  # a non-finite loss ends the run before the model is written
        rows = self.history.rows
        last = rows[-1] if rows else {}
        kept, chosen = last, dict[str, Any]()
        if (best := self.monitor.best(rows)) is not None:
            kept = next(row for row in rows if row["step"] == best.step)
            stopped = not early and step < self.job.steps
            chosen = {"best_step": best.step, "stopped_early": stopped}
        if self.job.steps == self.job.whole and not early and not self.job.measured:
            weights = model_state(self.model)
            if self.worker.rank == 0:
                if kept is not last:
                    weights = self.store.best(kept["step"])
                path = self.job.run_dir.model(self.job.trial_id)
                write_weights(self.job.run_dir, path, weights, self.task.metadata())
        return {
            "steps": step,
            "loss_final": last.get("loss"),
            "micro_batch": self.plan.micro_batch,
            "accumulation": self.plan.accumulation,
            "workers": self.plan.workers,
            "skipped_steps": self.update.skipped,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **{key: value for key, value in kept.items() if key.startswith("eval_")},
            **chosen,
            **({"ended_at": step} if early else {}),
        }

    def speed(self) -> dict[str, Any]:
        """Return throughput and FLOPs utilization."""
        summary: dict[str, Any] = self.throughput.summary()
        rows = self.history.rows[1:] or self.history.rows
        tokens = [row["tokens_per_s"] for row in rows if row.get("tokens_per_s")]
        summary["tokens_per_s"] = sum(tokens) / len(tokens) if tokens else None
        flops, rate = self.task.flops_per_sample(self.model), summary["samples_per_s"]
        achieved = flops * rate if flops and rate else None
        device = self.worker.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = peak_flops(name, self.training.precision)
        mfu = achieved / (peak * self.plan.workers) if achieved and peak else None
        return {**summary, "flops_per_s": achieved, "mfu": mfu}

    def store_rows(self) -> None:
        """Write the logged steps, and the telemetry of this worker."""
        if self.worker.rank == 0 and self.history.rows:
            self.history.store()
        self.sampler.store(self.job.run_dir, self.job.run_id)


def _ignore(event: dict[str, Any] | str) -> None:
    del event
