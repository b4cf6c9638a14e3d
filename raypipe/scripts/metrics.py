"""Metrics of a script: its records, read while it writes them, as rows of ``steps`` and a speed.

At every look the newest file is read from its start, so that a file that grew, was written again
or replaced by another one is one case.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import UnitError
from raypipe.stats import finite_or_none
from raypipe.store import tables
from raypipe.store.ledger import Row
from raypipe.training.job import TrainingJob
from raypipe.training.tables import STEPS, TRIALS

#: a record as the script wrote it: names and plain values
Record = dict[str, Any]

#: share of the time that reading may take
_SHARE = 0.1
_POLL_S = 0.05
_SHOWN = 80
_SEPARATORS = ",;\t|"
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
#: a number in a form that is not read: 1.234,5 or 1 000 or "0,5" in a comma-separated file
_FORMATTED = re.compile(
    r"[+-]?(?=[\d.]*[^\d.])\d+(?:[., '_\u00a0\u202f]\d+)*(?:[eE][+-]?\d+)?\s*%?"
)
#: a number as Python prints it within a dict: nan, np.float64(0.5), tensor(0.5, device='cuda:0')
_PRINTED = re.compile(r": (?:[\w.]+\()?(-?(?:nan|inf|[\d.][\d.e+-]*))(?:(?:, [^()]*)?\))?(?=[,}])")
#: names of scripts and frameworks by column; the first one that a script writes counts
_NAMES: Mapping[str, Sequence[str]] = {
    "step": ("step", "global_step"),
    "loss": ("loss", "train_loss", "train_loss_step", "loss_step", "training_loss"),
    "lr": ("lr", "learning_rate"),
    "samples_per_s": ("samples_per_s", "samples_per_second"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_second"),
    "epoch": ("epoch",),
}
_EVALUATION = re.compile(r"(?:val|valid|validation|dev)_(?=.)", re.IGNORECASE)
_COLUMNS = {name: column for column, names in _NAMES.items() for name in names}
#: columns of the tables that are not a script's to fill
_TAKEN = (*(column.name for column in STEPS.columns if column.type == "text"), *tables.ADDED)
#: consecutive rows whose loss is not finite, after which a training is ended
_OVERFLOWS = 3
_NO_STEPS = (
    "records have no step and no epoch, so only the last value of each name is kept; write step, "
    "or say which name it has, as in columns: {step: iter}"
)


class Reading(NamedTuple):
    """All records of a file, and remarks by what they are about.

    ``restarted``: it does not continue what was read before. ``problem``: why it cannot be read on.
    """

    records: list[Record]
    notes: dict[str, str] = {}  # noqa: RUF012 - of a tuple, which nobody changes
    problem: str = ""
    restarted: bool = False


class MetricsFile:
    """Reader of the newest file of a pattern, which may appear late, grow, or be truncated.

    Lines (JSON, Python dicts) and CSV are read up to the last whole line. A ``.json`` file is a
    list of records, or a document with one under ``log_history`` (``trainer_state.json`` of Hugging
    Face's Trainer).
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
        """
        started = time.monotonic()
        if started < self._next_look and not last:
            return None
        reading = self._read(last=last)
        took = time.monotonic() - started
        self._next_look = started + took + max(_POLL_S, took / _SHARE)
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
        return reading_of(text, path.suffix, last=last)._replace(restarted=restarted)


def reading_of(text: str, suffix: str, *, last: bool) -> Reading:
    """Return the records of a file's text, whose format follows from the suffix of its name.

    Among the remarks is the first text of each name that a reader would take for a number.
    """
    if suffix == ".json":
        return Reading(_document(text))
    records, notes = list[Record](), dict[str, str]()
    try:
        for line, record in _table(text, last=last) if suffix == ".csv" else _lines(text, notes):
            records.append(record)
            for name, value in record.items():
                is_text = isinstance(value, str) and _number(value) is None
                if is_text and _FORMATTED.fullmatch(value.strip()):
                    problem = "is not read as a number; write it with a decimal point and without "
                    problem += "other signs"
                    notes.setdefault(name, f"line {line}: {name} = {value[:_SHOWN]}: {problem}")
    except ValueError as error:
        return Reading(records, notes, str(error))
    return Reading(records, notes)


def _document(text: str) -> list[Record]:
    """Return the records of a JSON document; none while it is incomplete."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(content, Mapping):
        history = content.get("log_history")
        content = history if isinstance(history, list) else [content]
    return [record for record in content if isinstance(record, dict)]


def _lines(text: str, notes: dict[str, str]) -> Iterator[tuple[int, Record]]:
    """Yield the records of lines, JSON or Python dicts; note the first broken one."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.lstrip().startswith("{"):
            continue
        record: Any = None
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = ast.literal_eval(_PRINTED.sub(r": '\1'", line.strip()))
        if isinstance(record, dict):
            yield number, {str(name): value for name, value in record.items()}
        else:
            shown = line.strip()[:_SHOWN]
            problem = f"line {number}: begins like a record and cannot be read: {shown}"
            notes.setdefault("", f"{problem} (further ones are not named)")


def _table(text: str, *, last: bool) -> Iterator[tuple[int, Record]]:
    """Yield the records of CSV. Raises ValueError for a row that does not fit its header."""
    names, signs, rows = list[str](), set[str](), csv.reader(())
    try:
        separator = _separator_of(text.lstrip("\r\n").partition("\n")[0])
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        for row in rows:
            cells = [cell.strip() for cell in row]
            if _is_header(cells, names):
                names = cells
            elif any(cells):
                if separator != ",":  # else it is quoted: thousands, a list, or decimals
                    cells = [_with_point(cell, signs) for cell in cells]
                yield rows.line_num, dict(zip(names, cells, strict=True))
    except (ValueError, csv.Error) as error:
        is_open = str(error) == "unexpected end of data"  # within quotes
        if last or not is_open:
            problem = "a quote is not closed" if is_open else str(error)
            raise ValueError(f"line {rows.line_num or 1}: {problem}") from None


def _separator_of(header: str) -> str:
    """Return the separator that gives most columns. Raises ValueError if several do."""
    counts = {sign: len(next(csv.reader([header], delimiter=sign), [])) for sign in _SEPARATORS}
    best = [sign for sign, count in counts.items() if count == max(counts.values())]
    if len(best) > 1 and max(counts.values()) > 1:
        raise ValueError(f"{header}: the separator may be {' or '.join(best)}; use one of them")
    return best[0]


def _with_point(cell: str, signs: set[str]) -> str:
    """Return a cell with a decimal point in place of a comma; ``signs`` are those of the file.

    Raises:
        ValueError: the file has both decimal signs.

    """
    has_comma = _DECIMAL_COMMA.fullmatch(cell) is not None
    if has_comma or ("." in cell and _number(cell) is not None):
        signs.add("," if has_comma else ".")
    if len(signs) > 1:
        raise ValueError(f"{cell}: the file has decimal points and decimal commas; use points")
    return cell.replace(",", ".") if has_comma else cell


def _is_header(cells: list[str], names: list[str]) -> bool:
    """Whether a row is a header: the first one, or one that has names and no numbers.

    Raises:
        ValueError: it is neither a header nor a row of values that fits the header ``names``.

    """
    values = [cell for cell in cells if _number(cell) is not None or _DECIMAL_COMMA.fullmatch(cell)]
    count, problem = len(values), ""
    is_header = any(cells) and (not names or (not count and all(cells[1:])))
    if is_header and count == len(cells):
        problem = f"{', '.join(cells)}: must be the names of the columns"
    elif is_header and names and not {*cells} & ({*names} - {""}):
        problem = f"{', '.join(cells)}: neither numbers nor names of the header "
        problem += f"({', '.join(names)}); cells are separated by a comma, semicolon or tab"
    elif is_header and (twice := {name for name in cells if name and cells.count(name) > 1}):
        problem = f"the header names {min(twice)} twice; give each column its name"
    elif any(cells) and not is_header and len(cells) != len(names):
        problem = f"{len(cells)} cells for the {len(names)} names of the header "
        problem += f"({', '.join(names)}); write a new header when columns change, and separate "
        problem += "cells by a comma, semicolon or tab"
    if problem:
        raise ValueError(problem)
    return is_header


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by their names; of nested ones as ``outer/inner``.

    Text is a number if it can be read as one. Truth values are not numbers. Values may be NaN.
    """
    values: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            values |= {f"{name}/{inner}": each for inner, each in numbers(value).items()}
        elif not isinstance(value, bool) and (number := _number(value)) is not None:
            values[str(name)] = number
    return values


def _number(value: Any) -> float | None:
    """Return the number of a text or a number; not of ``2024_01``, which Python would read."""
    try:
        return None if isinstance(value, str) and "_" in value else float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def columns_of(
    names: Iterable[str], own: Mapping[str, str], notes: dict[str, str]
) -> dict[str, str]:
    """Return the column of each name that a script writes; note one that is not as expected.

    Args:
        names: the names, in the order in which they came.
        own: columns that the configuration gives to names.
        notes: receives the remarks.

    """

    def usual(name: str) -> str:
        if name.startswith("lr_"):  # Lightning's LearningRateMonitor: lr-AdamW
            return "lr"
        lower = name if name[0].islower() else name.lower()
        evaluated = _EVALUATION.sub("eval_", lower, count=1) if _EVALUATION.match(name) else name
        return _COLUMNS.get(name.lower(), evaluated)

    def order(name: str) -> tuple[bool, int, bool]:
        known, clean = list(_COLUMNS), _clean(name)
        rank = known.index(clean.lower()) if clean.lower() in known else -1
        return clean not in own, rank, usual(clean) != clean

    holders, columns = dict.fromkeys(_TAKEN, "values of raypipe"), dict[str, str]()
    for name in sorted(names, key=order):
        clean = _clean(name)
        wanted = own.get(clean, usual(clean))
        column = clean if wanted in holders else wanted
        while column in holders:
            column = f"metric_{column}"
        if column not in (wanted, clean):
            where = f"{name} is in the column {column}, as {wanted} has {holders[wanted]}"
            notes[name] = f"{where}; say which is which in columns"
        holders[column], columns[name] = name, column
    return columns


def _clean(name: str) -> str:
    """Return a name as a column: letters, digits and underscores."""
    return re.sub(r"\W+", "_", name).strip("_") or "value"


class _Arrival(NamedTuple):
    """Time at which records came, the last step by then, and the samples if known."""

    at: float
    step: int
    samples: float | None

    def rate(self, first: _Arrival) -> float | None:
        """Return the samples per second since an earlier arrival."""
        if first.samples is None or self.samples is None or self.at <= first.at:
            return None
        return (self.samples - first.samples) / (self.at - first.at)


class ScriptHistory:
    """Rows of the table ``steps`` by step, from the records of a script, and its speed.

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
        #: rows before those of the file that is read, and its records from an earlier attempt
        self._earlier: dict[int, Row] = {}
        self._old = 0
        self._first: _Arrival | None = None
        self._last: _Arrival | None = None
        #: by step: the script's own speed, that between the arrivals, and the losses of this
        #: attempt as the script wrote them
        self._rates: dict[int, float] = {}
        self._speeds: dict[int, float | None] = {}
        self._losses: dict[int, float] = {}
        self._notes: dict[str, str] = {}
        self._said: set[str] = set()

    def restore(self) -> None:
        """Read the rows of earlier attempts."""
        for row in tables.read_rows(self._job.run_dir, "steps", self._job.trial_id):
            self.rows[row["step"]] = {k: v for k, v in row.items() if v is not None}
        self._earlier = self.rows

    def add(self, reading: Reading, at: float | None) -> list[Row]:
        """Take the records of a file and return the rows that are new or differ.

        Rows of earlier files are kept up to its first step.

        Args:
            reading: all records of the file.
            at: when the new ones were written, in seconds; None for those of an earlier attempt.

        Raises:
            FloatingPointError: the loss of several consecutive rows is not finite.
            UnitError: a step is not a whole number.

        """
        if reading.restarted:
            self._earlier, self._old = self.rows, 0
        if at is None:
            self._old = len(reading.records)
        self._notes, written = dict(reading.notes), [numbers(each) for each in reading.records]
        columns = columns_of(dict.fromkeys(k for r in written for k in r), self._own, self._notes)
        records = [{columns[name]: value for name, value in r.items()} for r in written]
        for record in records:
            for name in {"step", "epoch"} & record.keys():
                if not math.isfinite(record[name]):
                    del record[name]
        rows, losses, summary = dict[int, Row](), dict[int, float](), dict[str, float]()
        arrived: list[tuple[int, float | None]] = []
        counts_steps = any("step" in record for record in records)
        counts_steps = counts_steps or any("epoch" not in row for row in self._earlier.values())
        steps = self._counted(records) if counts_steps else self._numbered(records)
        for place, (values, step) in enumerate(zip(records, steps, strict=True)):
            values.pop("step", None)
            if step is None:
                if any(summary.get(name, value) != value for name, value in values.items()):
                    self._notes["steps"] = _NO_STEPS
                summary |= values
                continue
            samples = values.pop("samples", None)
            if samples is None and counts_steps and self._effective_batch is not None:
                samples = float(step * self._effective_batch)
            if place >= self._old:
                arrived.append((step, samples))
                if (loss := values.get("loss")) is not None:
                    if losses.setdefault(step, loss) != loss:
                        advice = "write one record per step, and only in one process"
                        text = f"several losses of step {step}: the last one counts; {advice}"
                        self._notes.setdefault("losses", text)
                    losses[step] = loss
            if (rate := finite_or_none(values.get("samples_per_s"))) is not None:
                self._rates[step] = rate
            row = rows.setdefault(step, {"trial_id": self._job.trial_id, "step": step})
            row |= {name: finite_or_none(value) for name, value in values.items()}
        self.summary |= summary
        self._time(arrived, at)
        for step in rows.keys() & self._speeds.keys():
            rows[step].setdefault("samples_per_s", self._speeds[step])
        first, before = min(rows, default=math.inf), self.rows
        self.rows = {n: row for n, row in self._earlier.items() if n < first} | rows
        self._losses = {n: loss for n, loss in self._losses.items() if n < first} | losses
        self.check_losses(_OVERFLOWS)
        return [row for step, row in sorted(rows.items()) if row != before.get(step)]

    def _counted(self, records: Iterable[Mapping[str, float]]) -> Iterator[int | None]:
        """Yield the step of each record, of one with only an epoch the last one; None without."""
        last = max(self._earlier, default=0)
        for record in records:
            step = finite_or_none(record.get("step"))
            if step is not None and (step != int(step) or abs(step) >= 2**63):
                message = f"metrics: step = {step:g}: must be a whole number; write the number of "
                message += "steps, and anything else by another name"
                raise UnitError(self._job.trial_id, "error", message)
            last = last if step is None else int(step)
            yield None if step is None and "epoch" not in record else last

    def _numbered(self, records: Sequence[Mapping[str, float]]) -> Iterator[int | None]:
        """Yield the step of each record by its epoch; None without.

        It is the epoch if all are whole: from 1 if the first one is 0 and has a loss, since an
        evaluation before the training has none. Others are numbered.
        """
        epochs = dict.fromkeys(each["epoch"] for each in records if "epoch" in each)
        first = next(iter(epochs), 0.0)
        steps = {row["epoch"]: n for n, row in self._earlier.items() if row["epoch"] < first}
        is_whole = all(epoch.is_integer() for epoch in (*steps, *epochs))
        begins = next((record for record in records if "epoch" in record), {})
        for epoch in epochs:
            number = 1 + max(steps.values(), default=0)
            if is_whole:
                shifts = (n - int(e) for e, n in steps.items())
                number = int(epoch) + next(shifts, int(first == 0 and "loss" in begins))
            steps[epoch] = number
        yield from (steps[each["epoch"]] if "epoch" in each else None for each in records)

    def _time(self, arrived: Sequence[tuple[int, float | None]], at: float | None) -> None:
        """Record when steps came, each with its samples if known, and the speed since those before.

        ``at`` is None if the time is unknown.
        """
        last = self._last
        arrived = [each for each in arrived if last is None or each[0] > last.step]
        if at is None or not arrived:
            return
        samples = next((count for _, count in reversed(arrived) if count is not None), None)
        self._last = _Arrival(at, max(step for step, _ in arrived), samples)
        self._first = self._first or self._last
        if last is not None:
            self._speeds |= dict.fromkeys([step for step, _ in arrived], self._last.rate(last))

    def notes(self) -> list[str]:
        """Return the remarks since the last call: on lines, and on what is stored otherwise."""
        notes = [text for text in self._notes.values() if text not in self._said]
        self._said.update(notes)
        return notes

    def check_losses(self, number: int = 1) -> None:
        """Raise FloatingPointError if the last losses, so many, are not finite."""
        last = sorted(self._losses.items())[-number:]
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
        taken = {"step", "loss", "lr", *(column.name for column in TRIALS.columns)}
        last = {name: value for name, value in values.items() if name not in taken}
        return {**last, "steps": self.last_step, "loss_final": values.get("loss")}

    def speed(self, seconds: float | None) -> dict[str, float | None]:
        """Return the mean speed: the script's own, else that between its first and last records.

        Args:
            seconds: the duration of the whole script, which counts if all records came at once;
                None if the speed is then unknown.

        """
        rate = sum(self._rates.values()) / len(self._rates) if self._rates else None
        step_s, first, last = None, self._first, self._last
        if first is not None and last is not None and first is not last:
            step_s = (last.at - first.at) / (last.step - first.step)
            rate = rate or last.rate(first)
        elif first is not None:
            rate = rate or finite_or_none(self.last_values().get("train_samples_per_second"))
            if seconds is not None:
                step_s = seconds / first.step if first.step else None
                rate = rate or (first.samples or 0.0) / seconds or None
        return {"samples_per_s": rate, "step_time_s": step_s}
