"""Progress of a training in words: its workers, its state, where it was resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from raypipe.storage.ledger import Row

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob
    from raypipe.training.monitor import MonitorSettings

#: held-out measures on the line of a training
_MOST_MEASURES = 2


def last_step(checkpoints: Iterable[str]) -> int:
    """Return the step of the newest checkpoint by its name, 0 without any."""
    numbers = (name.removeprefix("step_") for name in checkpoints)
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def held_out(row: Row, monitor: MonitorSettings | None) -> dict[str, float]:
    """Return the held-out measures of a logged step by their short names, the monitored first."""
    found = {
        name.removeprefix("eval_"): value
        for name, value in row.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }
    first = monitor.metric if monitor is not None else None
    return dict(sorted(found.items(), key=lambda item: item[0] != first))  # stable


def training_note(row: Row, measures: Mapping[str, float]) -> str:
    """Return the state of a training, as far as it is known, the most important first."""
    loss, rate, speed = (row.get(name) for name in ("loss", "lr", "samples_per_s"))
    parts = [] if loss is None else [f"loss {loss:.4g}"]
    parts += [f"eval {name} {value:.4g}" for name, value in [*measures.items()][:_MOST_MEASURES]]
    parts += [] if rate is None else [f"lr {rate:.2g}"]
    return "  ".join(parts if speed is None else [*parts, f"{speed:.3g} samples/s"])


def workers_text(job: TrainingJob, device: str) -> str:
    """Return the workers of a training and the batch that they share, as far as it is known."""
    plan, training = job.plan, job.settings.training
    text = f"{plan.workers} worker{'s' * (plan.workers != 1)} on {device}"
    if training.effective_batch is not None:
        text += f", effective batch {plan.effective_batch}"
    if training.micro_batch is not None:
        text += f" of at most {plan.micro_batch} x {plan.accumulation} x {plan.workers}"
    return text
