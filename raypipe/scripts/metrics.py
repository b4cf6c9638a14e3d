"""Metrics of a script: its records, read while it writes them, as rows of ``steps`` and a speed.

At every look the file is read from its start, so that a file that grew and one that was written
again are one case.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.stats import finite_or_none
from raypipe.store import tables
from raypipe.store.ledger import Row
from raypipe.training.job import TrainingJob
from raypipe.training.tables import STEPS, TRIALS

#: a record as the script wrote it: names and plain values
Record = dict[str, Any]

#: share of the time that reading may take
_SHARE = 0.1
#: columns of the tables that are not a script's to fill
_TAKEN = (*(column.name for column in STEPS.columns if column.type == "text"), *tables.ADDED)
#: consecutive rows whose loss is not finite, after which a training is ended
_OVERFLOWS = 3
_NO_STEPS = (
    "records have no step and no epoch, so only the last value of each name is kept; write step, "
    "or say which name it has, as in columns: {step: iter}"
)


class Reading(NamedTuple):
    """Records that are new in a file, and a remark on a line that cannot be read.

    ``restarted``: they do not continue what was read before.
    """

    records: Sequence[Record]
    note: str = ""
    restarted: bool = False


class MetricsFile:
    """Reader of a file, which may appear late, grow, or be written again.

    Lines of JSON and CSV (``.csv``) are read up to the last whole line.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._text, self._number = path, "", 0
        self._next_look = 0.0

    def read(self, *, last: bool = False) -> Reading | None:
        """Return the records since the last call; None if the file is as it was then.

        With ``last``, an unfinished last line is one, too.

        Raises:
            ValueError: a row does not fit its header.

        """
        if (started := time.monotonic()) < self._next_look and not last:
            return None
        reading = self._read(last=last)
        self._next_look = time.monotonic() + (time.monotonic() - started) / _SHARE
        return reading

    def _read(self, *, last: bool) -> Reading | None:
        try:
            text = self._path.read_bytes().decode("utf-8-sig", errors="replace")
        except OSError:
            return None
        if not last:
            text = text[: text.rfind("\n") + 1]
        if text == self._text:
            return None
        restarted = not text.startswith(self._text)
        records, note = (_table if self._path.suffix == ".csv" else _lines)(text)
        known, self._text, self._number = 0 if restarted else self._number, text, len(records)
        return Reading(records[known:], note, restarted)


def _lines(text: str) -> tuple[list[Record], str]:
    """Return the records of lines of JSON or Python, and a remark on the first broken one."""
    records, note = list[Record](), ""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("{"):
            try:
                records.append(_record(line.strip()))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                note = note or f"line {number}: begins like a record and is not JSON: {line[:80]}"
    return records, note


def _record(line: str) -> Record:
    """Return a line of JSON, or of a dict as Python prints it. Raises any error for another one."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return dict(ast.literal_eval(line))


def _table(text: str) -> tuple[list[Record], str]:
    """Return the records of CSV. Raises ValueError for a row that does not fit its header.

    A row without a number is a new header, as of a script that goes on.
    """
    records, rows = list[Record](), csv.reader(io.StringIO(text, newline=""))
    names: list[str] = []
    for cells in rows:
        if not names or (any(cells) and not numbers(dict(enumerate(cells)))):
            names = [cell.strip() for cell in cells]
        elif cells and len(cells) != len(names):
            raise ValueError(
                f"line {rows.line_num}: {len(cells)} cells for the {len(names)} names of the "
                f"header ({', '.join(names)}); separate cells by commas"
            )
        elif cells:
            records.append(dict(zip(names, cells, strict=True)))
    return records, ""


def numbers(record: Mapping[Any, Any]) -> dict[Any, float]:
    """Return the numbers of a record by their names, texts included that can be read as one.

    Truth values are not numbers. Values may be NaN.
    """
    values: dict[Any, float] = {}
    for name, value in record.items():
        with suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool):
                values[name] = float(value)
    return values


def _clean(name: object) -> str:
    """Return a name as a column: lower-case letters, digits and underscores."""
    return re.sub(r"\W+", "_", str(name)).strip("_").lower() or "value"


class ScriptHistory:
    """Rows of the table ``steps`` by step, from the records of a script, and its speed.

    Records of the same step are one row. ``effective_batch`` is None if the script does not
    receive the batch sizes: its speed is then known only if it writes ``samples_per_s``.

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
        #: the columns of the names that the script has written
        self._columns: dict[Any, str] = {}
        self.rows: dict[int, Row] = {}
        #: what the script wrote without a step, such as a final accuracy
        self.summary: dict[str, float] = {}
        #: remarks on what is not stored as it was written; each once
        self.notes: list[str] = []
        #: when records came that had later steps than those before, and the last of these
        self._arrivals: list[tuple[float, int]] = []
        self._counts_steps = self._restarted = False

    def restore(self) -> None:
        """Read the rows of earlier attempts."""
        stored = tables.read_rows(self._job.run_dir, "steps", self._job.trial_id)
        self.rows, self._restarted = {row["step"]: row for row in stored}, True
        self._counts_steps = any(row["step"] != row.get("epoch") for row in stored)

    def add(self, reading: Reading, at: float | None) -> list[Row]:
        """Take records and return the rows that are new or differ.

        Records that do not continue the earlier ones replace these from their first step on.

        Args:
            reading: the records.
            at: when they were written, in seconds; None for those of an earlier attempt.

        Raises:
            FloatingPointError: the loss of several consecutive rows is not finite.
            ValueError: a step is not a whole number.

        """
        before, arrived = self.rows, list[int]()
        self.rows, self._restarted = {**before}, self._restarted or reading.restarted
        self._remark(reading.note)
        for record in reading.records:
            values = {self._column(name): value for name, value in numbers(record).items()}
            step = self._step(values)
            if step is None:
                if any(self.summary.get(name, value) != value for name, value in values.items()):
                    self._remark(_NO_STEPS)
                self.summary |= values
                continue
            if self._restarted:
                self.rows = {n: row for n, row in self.rows.items() if n < step}
                self._restarted = False
            row = self.rows.get(step, {"trial_id": self._job.trial_id, "step": step})
            self.rows[step] = row | {n: finite_or_none(value) for n, value in values.items()}
            arrived.append(step)
        latest = self._arrivals[-1][1] if self._arrivals else -math.inf
        if at is None:
            self._restarted = True
        elif max(arrived, default=latest) > latest:
            self._arrivals.append((at, max(arrived)))
        self.check_losses(_OVERFLOWS)
        return [row for step, row in sorted(self.rows.items()) if row != before.get(step)]

    def _remark(self, note: str) -> None:
        if note and note not in self.notes:
            self.notes.append(note)

    def _column(self, name: Any) -> str:
        """Return the column of a name: its own or a given one; ``metric_`` if that is taken."""
        if name not in self._columns:
            clean = _clean(name)
            column = self._own.get(clean, clean)
            taken = {*_TAKEN, *self._columns.values()}
            taken |= set() if clean in self._own else {*self._own.values()}
            while column in taken:
                column = f"metric_{column}"
            self._columns[name] = column
        return self._columns[name]

    def _step(self, values: dict[str, float]) -> int | None:
        """Take the step out of a record, or return that of its epoch; None if it has neither.

        The epoch is the step, but after records with steps it is the last one of these.
        """
        name, step = "step", finite_or_none(values.pop("step", None))
        if step is not None:
            self._counts_steps = True
        elif (epoch := finite_or_none(values.get("epoch"))) is not None:
            name, step = "epoch", self.last_step if self._counts_steps else epoch
        if step is not None and (step != int(step) or abs(step) >= 2**63):
            raise ValueError(
                f"{name} = {step:g}: must be a whole number; write the number of steps as step, "
                "and anything else by another name"
            )
        return None if step is None else int(step)

    def check_losses(self, number: int = 1) -> None:
        """Raise FloatingPointError if the last ``number`` losses are not finite."""
        losses = [(n, row["loss"]) for n, row in sorted(self.rows.items()) if "loss" in row]
        last = losses[-number:]
        if len(last) == number and all(loss is None for _, loss in last):
            raise FloatingPointError(f"the loss of the script is not finite at step {last[-1][0]}")

    def store(self) -> None:
        """Write the rows to the table ``steps``."""
        if self.rows:
            job, rows = self._job, [row for _, row in sorted(self.rows.items())]
            tables.write_table(job.run_dir, job.steps_table, rows, job.run_id, job.trial_id)

    @property
    def is_timed(self) -> bool:
        """Whether it is known when records came."""
        return bool(self._arrivals)

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
        taken = {"step", "loss", "lr", *(column.name for column in TRIALS.columns)}
        last = {name: value for name, value in values.items() if name not in taken}
        return {**last, "steps": self.last_step, "loss_final": values.get("loss")}

    def speed(self, seconds: float | None) -> dict[str, float | None]:
        """Return the mean speed: the script's own, else that between its first and last records.

        Args:
            seconds: the duration of the whole script, which counts if all records came at once;
                None if the speed is then unknown.

        """
        rates = [row["samples_per_s"] for row in self.rows.values() if row.get("samples_per_s")]
        rate, step_s = sum(rates) / len(rates) if rates else None, None
        if len(self._arrivals) > 1:
            (began, first), (ended, last) = self._arrivals[0], self._arrivals[-1]
            step_s = (ended - began) / (last - first)
        elif seconds is not None and self._arrivals and self._arrivals[0][1]:
            step_s = seconds / self._arrivals[0][1]
        if self._counts_steps and self._effective_batch is not None and step_s:
            rate = rate or self._effective_batch / step_s
        return {"samples_per_s": rate, "step_time_s": step_s}
