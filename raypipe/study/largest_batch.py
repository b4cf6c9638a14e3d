"""Largest micro-batch of each precision that fits: doubling, then bisection, in real steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import Session, StageContext
from raypipe.graph.experiment import Stage
from raypipe.graph.training_stage import job_of, with_cpus
from raypipe.graph.unit_logs import first_line
from raypipe.hardware import MEMORY_MARGIN, Hardware, Precision, bytes_text
from raypipe.store.ledger import Row
from raypipe.study.recommendation import peak_bytes
from raypipe.study.sweep import TrialMaker, check_counts_steps, trainings
from raypipe.study.sweep_settings import SweepSettings

#: a search ends where the smallest misfit exceeds the largest fit by at most a sixteenth of it
_PART = 16
_WARMUP_STEPS, _STEPS = 2, 4


def fitting(
    configuration: Configuration, stage: str | None, nodes: Sequence[Hardware]
) -> list[TrialMaker]:
    """Return the trial makers of every training stage, or of one.

    Raises:
        ConfigError: there is no such training stage, or none at all.

    """
    makers = []
    for name, training in trainings(configuration, stage):
        check_counts_steps(training, f"{configuration.origin}: {name}.command", "raypipe fit")
        if training.settings.training.micro_batch is None:
            raise ConfigError(
                f"{configuration.origin}: {name}.command: the script does not receive "
                "{micro_batch}, whose largest value raypipe fit finds"
            )
        axes = {f"{name}.training.precision": AxisSettings(values=get_args(Precision))}
        sweep = SweepSettings(stage=name, axes=axes, warmup_steps=_WARMUP_STEPS, steps=_STEPS)
        makers.append(TrialMaker(configuration, sweep, nodes, training))
    return makers


def fit_stage(maker: TrialMaker, session: Session) -> list[Row]:
    """Return one row per precision: its largest micro-batch within the margin, and speed."""
    context = StageContext(Stage(maker.sweep.stage, lambda _: None, []), session)
    return [_largest(context, maker, precision) for precision in get_args(Precision)]


def _largest(context: StageContext, maker: TrialMaker, precision: str) -> Row:
    """Find the largest micro-batch of a precision with trainings of a few steps."""
    own, settings = f"{context.stage.name}.training", maker.swept.settings
    effective = settings.training.effective_batch
    most = math.ceil((effective or 1) / settings.scaling.worker_count)
    fits, note, failed = 0, "", False
    too_large: int | None = None
    outcome: Row | None = None
    while not note and (size := next_size(fits, too_large, most)) is not None:
        sizes = {"micro_batch": size, "precision": precision, "effective_batch": effective}
        trial = maker.any_trial({f"{own}.{key}": value for key, value in sizes.items() if value})
        if note := trial.lacks:
            break
        job = with_cpus(context, job_of(context, trial.unit, trial.training, None))
        try:
            row = context.session.launcher.train(replace(job, measured=True), lambda _: None)
        except UnitError as error:
            if error.kind == "out_of_memory":
                too_large, said = size, "out of memory"
            else:
                note = said = f"{error.kind}: {first_line(error.message)}"
                failed = True
        else:
            peak, said = peak_bytes(row), f"{row['samples_per_s']:.4g} samples/s"
            said += f", peak memory {bytes_text(peak)}" if peak else ""
            if leaves_margin(row, maker.device[1]):
                fits, outcome = size, row
            else:
                too_large = size
        context.say(f"{precision}, micro-batch {size}: {said}")
    if not note and fits in (0, most):
        end = "all of a worker's share of training.effective_batch"
        note = end if fits else "micro-batch 1 does not fit"
    found: Row = {"stage": context.stage.name, "precision": precision, "micro_batch": fits or None}
    if outcome is not None:
        found |= {key: outcome.get(key) for key in ("accumulation", "workers", "samples_per_s")}
        found["peak_bytes"] = peak_bytes(outcome)
    return {**found, "too_large": too_large, "failed": failed, "note": note}


def next_size(fits: int, too_large: int | None, most: int) -> int | None:
    """Return the micro-batch to try next; None once the largest that fits is known."""
    if too_large is None:
        return None if fits >= most else min(2 * fits, most) or 1
    if too_large - fits <= max(1, fits // _PART):
        return None
    return (fits + too_large) // 2


def leaves_margin(outcome: Row, capacity: float) -> bool:
    """Whether a training left memory free beside its own and all that others hold.

    These are the CUDA context, the buffers of NCCL, and other processes.
    """
    used = (peak_bytes(outcome), outcome.get("gpu_memory_used_peak_bytes"))
    return all(size <= (1 - MEMORY_MARGIN) * capacity for size in used if size)
