"""Metrics of a script: its records, read while it writes them, as rows of ``steps`` and a speed.

At every look the newest file is read from its start, so that a file that grew, was written again
or replaced by another one is one case.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
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
#: names of scripts and frameworks by their column; the first one that a script writes counts
_COLUMNS = {
    "global_step": "step",
    "train_loss": "loss",
    "train_loss_step": "loss",
    "loss_step": "loss",
    "training_loss": "loss",
    "learning_rate": "lr",
    "samples_per_second": "samples_per_s",
    "tokens_per_second": "tokens_per_s",
}
_EVALUATION = re.compile(r"^(?:val|valid|validation|dev)_(?=.)")
#: columns of the tables that are not a script's to fill
_TAKEN = (*(column.name for column in STEPS.columns if column.type == "text"), *tables.ADDED)
#: consecutive rows whose loss is not finite, after which a training is ended
_OVERFLOWS = 3
_NO_STEPS = (
    "records have no step and no epoch, so only the last value of each name is kept; write step, "
    "or say which name it has, as in columns: {step: iter}"
)


class Reading(NamedTuple):
    """All records of a file, and a remark on a line that cannot be read.

    ``restarted``: it does not continue what was read before.
    """

    records: list[Record]
    note: str = ""
    restarted: bool = False


class MetricsFile:
    """Reader of the newest file of a pattern, which may appear late, grow, or be truncated.

    Lines of JSON and CSV are read up to the last whole line. A ``.json`` file is a list of records,
    or a document with one under ``log_history`` (``trainer_state.json`` of Hugging Face's Trainer).
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._text: str | None = None
        self._next_look = 0.0

    def files(self) -> list[Path]:
        """Return the files of the pattern, the newest last."""
        changed = {}
        for path in self._folder.glob(self._pattern):
            with suppress(OSError):  # deleted meanwhile
                if path.is_file():
                    changed[path] = path.stat().st_mtime_ns
        return sorted(changed, key=lambda path: (changed[path], str(path)))

    def read(self, *, last: bool = False) -> Reading | None:
        """Return all records of a file that changed since the last call; None if none did.

        With ``last``, also the records of a file that did not, and an unfinished last line.

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
            path = self.files()[-1]
            text = path.read_bytes().decode("utf-8-sig", errors="replace")
        except (IndexError, OSError):
            return None
        if path.suffix != ".json" and not last:
            text = text[: text.rfind("\n") + 1]
        if text == self._text and not last:
            return None
        restarted = not text.startswith(self._text or "")
        self._text = text
        reader = {".json": _document, ".csv": _table}.get(path.suffix, _lines)
        return reader(text)._replace(restarted=restarted)


def _document(text: str) -> Reading:
    """Return the records of a JSON document; none while it is incomplete."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return Reading([])
    if isinstance(content, Mapping):
        history = content.get("log_history")
        content = history if isinstance(history, list) else [content]
    return Reading([record for record in content if isinstance(record, dict)])


def _lines(text: str) -> Reading:
    """Return the records of lines of JSON, and a remark on the first broken one."""
    records, note = list[Record](), ""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("{"):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                note = note or f"line {number}: begins like a record and is not JSON: {line[:80]}"
    return Reading(records, note)


def _table(text: str) -> Reading:
    """Return the records of CSV. Raises ValueError for a row that does not fit its header."""
    records, rows = list[Record](), csv.reader(io.StringIO(text, newline=""))
    names = [cell.strip() for cell in next(rows, [])]
    for cells in rows:
        if cells and len(cells) != len(names):
            raise ValueError(
                f"line {rows.line_num}: {len(cells)} cells for the {len(names)} names of the "
                f"header ({', '.join(names)}); separate cells by commas"
            )
        if cells and cells != names:  # a script that goes on may write the header again
            records.append(dict(zip(names, cells, strict=True)))
    return Reading(records)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by their names, texts included that can be read as one.

    Truth values are not numbers. Values may be NaN.
    """
    values: dict[str, float] = {}
    for name, value in record.items():
        with suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool):
                values[name] = float(value)
    return values


def columns_of(names: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the column of each name that a script writes.

    Args:
        names: the names, in the order in which they came.
        own: columns that the configuration gives to names.

    """

    def usual(name: str) -> str:
        if name.startswith("lr_"):  # Lightning's LearningRateMonitor: lr-AdamW
            return "lr"
        return _COLUMNS.get(name, _EVALUATION.sub("eval_", name, count=1))

    known, columns = list(_COLUMNS), dict[str, str]()

    def order(name: str) -> tuple[bool, bool, int]:
        clean = _clean(name)
        rank = known.index(clean) if clean in known else 0
        return clean not in own, usual(clean) != clean, rank

    for name in sorted(names, key=order):
        clean, taken = _clean(name), {*_TAKEN, *columns.values()}
        wanted = (own.get(clean, usual(clean)), clean)
        free = (column for column in wanted if column not in taken)
        columns[name] = next(free, f"metric_{clean}")
    return columns


def _clean(name: str) -> str:
    """Return a name as a column: lower-case letters, digits and underscores."""
    return re.sub(r"\W+", "_", name).strip("_").lower() or "value"


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
        self.rows: dict[int, Row] = {}
        #: what the script wrote without a step, such as a final accuracy
        self.summary: dict[str, float] = {}
        #: remarks on what is not stored as it was written; each once
        self.notes: list[str] = []
        #: rows before those of the file that is read, and its records from an earlier attempt
        self._earlier: dict[int, Row] = {}
        self._old = 0
        #: when records came that had later steps than those before, and the last of these
        self._arrivals: list[tuple[float, int]] = []
        self._counts_steps = False

    def restore(self) -> None:
        """Read the rows of earlier attempts."""
        stored = tables.read_rows(self._job.run_dir, "steps", self._job.trial_id)
        self._earlier = self.rows = {row["step"]: row for row in stored}

    def add(self, reading: Reading, at: float | None) -> list[Row]:
        """Take the records of a file and return the rows that are new or differ.

        Rows of earlier files are kept up to its first step.

        Args:
            reading: all records of the file.
            at: when the new ones were written, in seconds; None for those of an earlier attempt.

        Raises:
            FloatingPointError: the loss of several consecutive rows is not finite.
            ValueError: a step is not a whole number.

        """
        if reading.restarted:
            self._earlier, self._old = self.rows, 0
        if at is None:
            self._old = len(reading.records)
        written = [numbers(each) for each in reading.records]
        columns = columns_of(dict.fromkeys(k for r in written for k in r), self._own)
        records = [{columns[name]: value for name, value in r.items()} for r in written]
        rows, summary, notes = dict[int, Row](), dict[str, float](), [reading.note]
        arrived = list[int]()
        self._counts_steps = any("step" in record for record in records)
        newest = max(self._earlier, default=0)
        for place, values in enumerate(records):
            step = self._step(values, newest if self._counts_steps else None)
            if step is None:
                if any(summary.get(name, value) != value for name, value in values.items()):
                    notes.append(_NO_STEPS)
                summary |= values
                continue
            newest = max(newest, step) if rows else step
            if place >= self._old:
                arrived.append(step)
            row = rows.setdefault(step, {"trial_id": self._job.trial_id, "step": step})
            row |= {name: finite_or_none(value) for name, value in values.items()}
        self.summary |= summary
        self.notes += [each for each in dict.fromkeys(notes) if each and each not in self.notes]
        latest = self._arrivals[-1][1] if self._arrivals else -math.inf
        if at is not None and max(arrived, default=latest) > latest:
            self._arrivals.append((at, max(arrived)))
        first, before = min(rows, default=math.inf), self.rows
        self.rows = {n: row for n, row in self._earlier.items() if n < first} | rows
        self.check_losses(_OVERFLOWS)
        return [row for step, row in sorted(rows.items()) if row != before.get(step)]

    def _step(self, values: dict[str, float], last: int | None) -> int | None:
        """Take the step out of a record, or return that of its epoch; None if it has neither.

        The epoch is the step, but in a file that has steps (``last`` is its last one).
        """
        epoch = finite_or_none(values.get("epoch"))
        step = finite_or_none(values.pop("step", None))
        if step is None and epoch is not None:
            step = epoch if last is None else last
        if step is not None and (step != int(step) or abs(step) >= 2**63):
            name = "epoch" if step == epoch and last is None else "step"
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
        rate = sum(rates) / len(rates) if rates else None
        rate = rate or finite_or_none(self.last_values().get("train_samples_per_second"))
        step_s = None
        if len(self._arrivals) > 1:
            (began, first), (ended, last) = self._arrivals[0], self._arrivals[-1]
            step_s = (ended - began) / (last - first)
        elif seconds is not None and self._arrivals and self._arrivals[0][1]:
            step_s = seconds / self._arrivals[0][1]
        if self._counts_steps and self._effective_batch is not None and step_s:
            rate = rate or self._effective_batch / step_s
        return {"samples_per_s": rate, "step_time_s": step_s}
