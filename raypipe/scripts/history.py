"""History of a script: its records as rows of ``steps``, its speed, and its last values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raypipe.errors import UnitError
from raypipe.scripts.metrics import Reading, numbers
from raypipe.stats import finite_or_none
from raypipe.store import tables
from raypipe.store.ledger import Row
from raypipe.training.job import TrainingJob
from raypipe.training.tables import STEPS, TRIALS

_STEPS = ("step", "global_step")
#: names of scripts and frameworks by column; the first one that a record has counts
_NAMES: Mapping[str, Sequence[str]] = {
    "loss": ("loss", "train_loss", "train_loss_step", "loss_step", "training_loss"),
    "lr": ("lr", "learning_rate"),
    "samples_per_s": ("samples_per_s", "samples_per_second"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_second"),
    "epoch": ("epoch",),
}
_EVALUATION = re.compile(r"(?:val|valid|validation|dev)_(?=.)", re.IGNORECASE)
_RATE = re.compile(r"lr_\w+")  # Lightning's LearningRateMonitor: lr-AdamW
_COLUMNS = {name: column for column, names in _NAMES.items() for name in names}
_RANKS = {name: rank for rank, name in enumerate(_COLUMNS)}
#: the summary of Hugging Face's Trainer, whose train_loss is a mean over the training
_SUMMARY = "train_runtime"
#: columns of the tables that are not a script's to fill
_TAKEN = {
    "step",
    *(column.name for column in STEPS.columns if column.type == "text"),
    *("run_id", "variant", "command_id"),
}
#: consecutive rows whose loss is not finite, after which a training is ended
_OVERFLOWS = 3
_NO_STEPS = (
    "records have no step and no epoch, so only the last value of each name is kept; write step, "
    "or say which name it has, as in columns: {step: iter}"
)


class _Arrival(NamedTuple):
    """Time at which records came, the last step by then, and the samples if known."""

    at: float
    step: int
    samples: float | None

    def rate_since(self, first: _Arrival) -> float | None:
        """Return the samples per second since an earlier arrival."""
        if first.samples is None or self.samples is None or self.at <= first.at:
            return None
        return (self.samples - first.samples) / (self.at - first.at)


class ScriptHistory:
    """Rows of the table ``steps`` by step, from the records of a script.

    Records of the same step are one row. ``effective_batch`` is None if the script does not
    receive the batch sizes: its speed is then known only if it writes ``samples`` (so far).

    Args:
        job: the training.
        columns: the script's names by column.
        effective_batch: samples per step, None if unknown.

    """

    def __init__(
        self, job: TrainingJob, columns: Mapping[str, str], effective_batch: int | None
    ) -> None:
        self._job, self._effective_batch = job, effective_batch
        self._own = {_clean(name): column for column, name in columns.items()}
        self.rows: dict[int, Row] = {}
        #: what the script wrote without a step, such as a final accuracy
        self.summary: dict[str, float] = {}
        self._first: _Arrival | None = None
        self._last: _Arrival | None = None
        self._rates: list[float] = []
        #: steps of the records that have only an epoch, and whether other records have a step
        self._epochs: dict[float, int] = {}
        self._counts_steps = False
        #: the script's name of each column
        self._sources: dict[str, str] = {}
        #: losses of this attempt by step, as the script wrote them, in the order of the records
        self._written: dict[int, float] = {}
        #: remarks on what is not stored as it was written, one per kind, until they are taken
        self._notes: dict[str, str] = {}

    def restore(self) -> None:
        """Read the rows of earlier attempts."""
        for row in tables.read_rows(self._job.run_dir, "steps", self._job.trial_id):
            self.rows[row["step"]] = {k: v for k, v in row.items() if v is not None}
        self._counts_steps = any("epoch" not in row for row in self.rows.values())
        self._epochs = {row["epoch"]: n for n, row in self.rows.items() if "epoch" in row}
        names = {name for row in self.rows.values() for name in row}
        own = {name: name for name in names if _evaluation(name) in names - {name}}
        self._own = own | self._own

    def add(self, batch: Reading, at: float | None) -> list[Row]:
        """Add records and return the rows that are new or differ.

        Args:
            batch: the records; if they are from a file that was restarted, rows from their first
                step on are dropped.
            at: when they were written, in seconds; None if unknown.

        Raises:
            FloatingPointError: the loss of several consecutive rows is not finite.
            UnitError: a step is not a whole number.

        """
        earlier, before = self.rows, dict[int, Row]()
        samples: float | None = None
        for record in batch.records:
            values = self._columns(numbers(record))
            counts_steps, step = "step" in values, finite_or_none(values.pop("step", None))
            if step is None and not counts_steps:
                step = finite_or_none(values.get("epoch"))
            if step is None:
                if any(self.summary.get(name, value) != value for name, value in values.items()):
                    self._notes.setdefault("steps", _NO_STEPS)
                self.summary |= values
                continue
            begins = batch.restarted and not before
            if counts_steps:
                number = self._whole(step)
            else:
                number = self._step_of(step, first=begins, trained="loss" in values)
            if begins:
                self.rows = {key: row for key, row in self.rows.items() if key < number}
                self._epochs = {key: n for key, n in self._epochs.items() if n <= number}
                self._written = {n: loss for n, loss in self._written.items() if n < number}
            total = values.pop("samples", None)
            if total is None and counts_steps and self._effective_batch is not None:
                total = float(number * self._effective_batch)
            samples = total if total is not None else samples
            if number not in before:
                before[number] = dict(earlier.get(number, {}))
            row = self.rows.setdefault(number, {"trial_id": self._job.trial_id, "step": number})
            if before[number]:  # the same row in a file that was written again
                row.setdefault("samples_per_s", before[number].get("samples_per_s"))
            if at is not None and (loss := values.get("loss")) is not None:
                if self._written.pop(number, loss) != loss:
                    self._notes.setdefault(
                        "losses",
                        f"several losses of step {number}: the last one counts; write one record "
                        "per step, and only in one process",
                    )
                self._written[number] = loss
            if (rate := finite_or_none(values.get("samples_per_s"))) is not None:
                self._rates.append(rate)
            row |= {name: finite_or_none(value) for name, value in values.items()}
        if before and at is not None:
            self._time(_Arrival(at, max(before), samples), before)
        self._check_losses(_OVERFLOWS)
        rows = {number: self.rows[number] for number in sorted(before)}
        return [row for number, row in rows.items() if row != before[number]]

    def _whole(self, step: float) -> int:
        if step != int(step) or abs(step) >= 2**63:
            message = (
                f"metrics: step = {step:g}: must be a whole number; write the number of steps, and "
                "anything else by another name"
            )
            raise UnitError(self._job.trial_id, "error", message)
        self._counts_steps = True
        return int(step)

    def _step_of(self, epoch: float, *, first: bool, trained: bool) -> int:
        """Return the step of a record that has only an epoch: the epoch, if all are whole.

        Else such records are numbered; beside records with steps, they are of the last one.
        ``first``: the file begins with it, and what was known of later epochs no longer counts.
        ``trained``: it has a loss, so that the script counts from 0 if epoch 0 is its first one; an
        evaluation before the training has none.
        """
        if self._counts_steps:
            return self.last_step
        if epoch not in self._epochs:
            known = [n for e, n in self._epochs.items() if e < epoch or not first]
            number = 1 + max(known, default=0)
            if all(each == int(each) for each in (*self._epochs, epoch)):
                shifts = (n - int(e) for e, n in self._epochs.items())
                number = int(epoch) + next(shifts, int(epoch == 0 and trained))
            self._epochs[epoch] = number
        return self._epochs[epoch]

    def _time(self, arrival: _Arrival, touched: Mapping[int, Row]) -> None:
        """Record when the rows came, and the speed since those before."""
        last = self._last
        if last is not None and arrival.step <= last.step:
            return
        rate = arrival.rate_since(last) if last is not None else None
        for number in touched:
            if last is None or number > last.step:
                self.rows[number].setdefault("samples_per_s", rate)
        self._first, self._last = self._first or arrival, arrival

    def notes(self) -> list[str]:
        """Return the remarks since the last call."""
        notes = [text for text in self._notes.values() if text]
        self._notes = dict.fromkeys(self._notes, "")
        return notes

    def finish(self) -> None:
        """Raise FloatingPointError if the last loss is not finite."""
        self._check_losses(1)

    def _check_losses(self, number: int) -> None:
        last = list(self._written.items())[-number:]
        if len(last) == number and not any(math.isfinite(loss) for _, loss in last):
            step, loss = last[-1]
            raise FloatingPointError(f"the loss of the script is {loss} at step {step}")

    def store(self) -> None:
        """Write the rows to the table ``steps``."""
        if self.rows:
            job, rows = self._job, [row for _, row in sorted(self.rows.items())]
            tables.write_table(job.run_dir, job.steps_table, rows, job.run_id, job.trial_id)

    @property
    def is_timed(self) -> bool:
        """Whether it is known when records came."""
        return self._first is not None

    @property
    def last_step(self) -> int:
        """The last step of the script that is known; 0 if there is none."""
        return max(self.rows, default=0)

    def last_values(self) -> dict[str, Any]:
        """Return the last value of each metric, None if it is not finite, for ``trials``."""
        values: dict[str, Any] = {}
        for _, row in sorted(self.rows.items()):
            values |= row
        values |= {name: finite_or_none(value) for name, value in self.summary.items()}
        taken = {column.name for column in TRIALS.columns if not column.name.startswith("eval_")}
        last = {k: v for k, v in values.items() if k not in taken | {"step", "loss", "lr"}}
        return {**last, "steps": self.last_step, "loss_final": values.get("loss")}

    def speed(self, seconds: float | None) -> dict[str, float | None]:
        """Return the mean speed: the script's own, else that between its first and last records.

        Args:
            seconds: the duration of the whole script, which counts if all records came at once;
                None if the speed is then unknown.

        """
        rate = sum(self._rates) / len(self._rates) if self._rates else None
        step_s, first, last = None, self._first, self._last
        if first is not None and last is not None and first is not last:
            step_s = (last.at - first.at) / (last.step - first.step)
            rate = rate or last.rate_since(first)
        elif first is not None:
            rate = rate or finite_or_none(self.last_values().get("train_samples_per_second"))
            if seconds is not None:
                step_s = seconds / first.step if first.step else None
                rate = rate or (first.samples or 0.0) / seconds or None
        return {"samples_per_s": rate, "step_time_s": step_s}

    def _columns(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return values by column; ``step`` only where the script counts steps."""
        rest = dict(values)
        plain = {_clean(name).lower(): name for name in rest}
        steps = [name for name in rest if self._own.get(_clean(name)) == "step"]
        steps += [plain[name] for name in _STEPS if name in plain]
        columns = {"step": rest.pop(steps[0])} if steps else {}
        for name in sorted(rest, key=_precedence):
            is_mean = _SUMMARY in values and name == "train_loss"
            columns[self._column(name, is_mean=is_mean)] = rest[name]
        return columns

    def _column(self, name: str, *, is_mean: bool) -> str:
        """Return the column of a script's name: the usual one, if no other name has it."""
        own = _clean(name)
        usual = "lr" if _RATE.fullmatch(own) else _COLUMNS.get(own.lower()) or _evaluation(own)
        wanted = own if is_mean else self._own.get(own, usual)
        for column in (wanted, own, f"metric_{own}"):
            if column not in _TAKEN and self._sources.setdefault(column, name) == name:
                if column not in (wanted, own):
                    holder = self._sources.get(wanted, "values of raypipe")
                    self._notes.setdefault(
                        name,
                        f"{name} is in the column {column}, as {wanted} has {holder}; say which is "
                        "which in columns",
                    )
                return column
        return f"metric_metric_{own}"


def _evaluation(name: str) -> str:
    """Return the column of a held-out metric: ``eval_loss`` of ``val_loss`` and ``Val_Loss``."""
    if _EVALUATION.match(name) is None:
        return name
    is_lower = name[0].islower()
    return _EVALUATION.sub("eval_", name if is_lower else name.lower(), count=1)


def _precedence(name: str) -> tuple[int, bool]:
    """Order the names of a record: of those of one column, its own name comes first."""
    own = _clean(name)
    return _RANKS.get(own.lower(), -1), _evaluation(own) != own


def _clean(name: str) -> str:
    """Return a name as a column: letters, digits and underscores."""
    return re.sub(r"\W+", "_", name).strip("_") or "value"
