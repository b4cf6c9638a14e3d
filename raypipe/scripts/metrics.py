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
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
#: lines that cannot be read that are named
_MOST_NOTES = 3
_SEPARATORS = ",;\t|"
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
#: a number in a form that is not read: 1.234,5 or 1 000 or "0,5" in a comma-separated file
_FORMATTED = re.compile(
    r"[+-]?(?=[\d.]*[^\d.])\d+(?:[., '_\u00a0\u202f]\d+)*(?:[eE][+-]?\d+)?\s*%?"
)
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


class Reading(NamedTuple):
    """All records of a file, and remarks on lines that could not be read.

    ``restarted``: it does not continue what was read before. ``problem``: why it cannot be read on.
    """

    records: list[Record]
    notes: list[str] = []  # noqa: RUF012 - of a tuple, which nobody changes
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
        self._state: tuple[Path, int, int, int] | None = None
        self._text, self._next_look = "", 0.0

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
            stat = path.stat()
            state = (path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if state == self._state and not last:
                return None
            text = path.read_bytes().decode("utf-8-sig", errors="replace")
        except (IndexError, OSError):
            return None
        if path.suffix != ".json" and not last:
            text = text[: text.rfind("\n") + 1]
        restarted = not text.startswith(self._text)
        self._state, self._text = state, text
        return reading_of(text, path.suffix, last=last)._replace(restarted=restarted)


def reading_of(text: str, suffix: str, *, last: bool) -> Reading:
    """Return the records of a file's text, whose format follows from the suffix of its name.

    Among the remarks is the first text of each name that a reader would take for a number.
    """
    if suffix == ".json":
        return Reading(_document(text))
    records: list[Record] = []
    notes: list[str] = []
    named = set[str]()
    try:
        for line, record in _table(text, last=last) if suffix == ".csv" else _lines(text, notes):
            records.append(record)
            for name, value in record.items():
                if name in named or not isinstance(value, str) or _number(value) is not None:
                    continue
                if _FORMATTED.fullmatch(value.strip()):
                    named.add(name)
                    notes.append(
                        f"line {line}: {name} = {value[:_SHOWN]}: is not read as a number; "
                        "write it with a decimal point and without other signs"
                    )
    except ValueError as error:
        return Reading(records, notes, str(error))
    return Reading(records, notes)


def _lines(text: str, notes: list[str]) -> Iterator[tuple[int, Record]]:
    """Yield the records of lines, JSON or Python dicts; note the first broken ones."""
    broken = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.lstrip().startswith("{"):
            continue
        if (record := _record_of(line.strip())) is not None:
            yield number, record
            continue
        broken += 1
        if broken <= _MOST_NOTES:
            more = " (further ones are not named)" * (broken == _MOST_NOTES)
            shown = line.strip()[:_SHOWN]
            notes.append(f"line {number}: begins like a record and cannot be read: {shown}{more}")


def _table(text: str, *, last: bool) -> Iterator[tuple[int, Record]]:
    """Yield the records of CSV. Raises ValueError for a row that does not fit its header."""
    names: list[str] = []
    signs = set[str]()
    rows = csv.reader(())
    try:
        separator = _separator_of(text.lstrip("\r\n").partition("\n")[0])
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        for row in rows:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if _is_header(cells, names):
                names = cells
            else:
                yield rows.line_num, _record(cells, names, separator, signs)
    except (ValueError, csv.Error) as error:
        is_open = str(error) == "unexpected end of data"  # within quotes
        if last or not is_open:
            problem = "a quote is not closed" if is_open else error
            raise ValueError(f"line {rows.line_num or 1}: {problem}") from None


def _separator_of(header: str) -> str:
    """Return the separator that gives most columns. Raises ValueError if several do."""
    counts = {sign: len(next(csv.reader([header], delimiter=sign))) for sign in _SEPARATORS}
    best = [sign for sign, count in counts.items() if count == max(counts.values())]
    if len(best) > 1 and max(counts.values()) > 1:
        raise ValueError(f"{header}: the separator may be {' or '.join(best)}; use one of them")
    return best[0]


def _is_header(cells: list[str], names: list[str]) -> bool:
    """Whether a row is a header: the first one, or one that has names and no numbers.

    Raises:
        ValueError: it is neither a header nor a row of values.

    """
    count = sum(_number(cell) is not None or _has_comma(cell) for cell in cells)
    if names and (count or not all(cells[1:])):
        return False
    if not names and count == len(cells):
        raise ValueError(f"{', '.join(cells)}: must be the names of the columns")
    if names and not set(cells) & (set(names) - {""}):
        raise ValueError(
            f"{', '.join(cells)}: neither numbers nor names of the header "
            f"({', '.join(names)}); cells are separated by a comma, semicolon or tab"
        )
    if twice := {name for name in cells if name and cells.count(name) > 1}:
        raise ValueError(f"the header names {min(twice)} twice; give each column its name")
    return True


def _record(cells: list[str], names: list[str], separator: str, signs: set[str]) -> Record:
    """Return the record of a row; ``signs`` receives the decimal signs of the file.

    Raises:
        ValueError: the row does not fit its header, or the file has both decimal signs.

    """
    if len(cells) != len(names):
        raise ValueError(
            f"{len(cells)} cells for the {len(names)} names of the header "
            f"({', '.join(names)}); write a new header when columns change, and separate "
            "cells by a comma, semicolon or tab"
        )
    record = dict(zip(names, cells, strict=True))
    for name, cell in record.items():
        if _has_comma(cell) and separator != ",":  # else quoted: thousands, a list, or decimals
            signs.add(",")
            record[name] = cell.replace(",", ".")
        elif "." in cell and _number(cell) is not None:
            signs.add(".")
        if len(signs) > 1:
            raise ValueError(f"{cell}: the file has decimal points and decimal commas; use points")
    return record


def _has_comma(cell: str) -> bool:
    return _DECIMAL_COMMA.fullmatch(cell) is not None


def _record_of(text: str) -> Record | None:
    """Return the record of a JSON object, or of a dict as Python prints it; else None."""
    record: Any = None
    with warnings.catch_warnings(), suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        warnings.simplefilter("ignore")  # of the compiler, such as invalid escapes
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = _plain(ast.parse(text, mode="eval").body)
    return record if isinstance(record, dict) else None


def _plain(node: ast.expr | None) -> Any:
    """Return the value of a literal; None for anything that is not a number, a text or a dict.

    Numbers may be nan, or scalars of numpy and torch: ``tensor(0.5, device='cuda:0')``.
    """
    match node:
        case ast.Dict():
            return {str(_plain(k)): _plain(v) for k, v in zip(node.keys, node.values, strict=True)}
        case ast.Call(args=[first, *_]):
            return _plain(first)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _plain(operand)
            return -value if isinstance(value, int | float) else None
        case ast.Name(id=name):
            return {"nan": math.nan, "inf": math.inf}.get(name.lower())
    return node.value if isinstance(node, ast.Constant) else None


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


class _Arrival(NamedTuple):
    """Time at which records came, the last step by then, and the samples if known."""

    at: float
    step: int
    samples: float | None


def _rate(first: _Arrival, last: _Arrival) -> float | None:
    """Return the samples per second between two arrivals."""
    if first.samples is None or last.samples is None or last.at <= first.at:
        return None
    return (last.samples - first.samples) / (last.at - first.at)


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
        #: rows before those of the file that is read
        self._earlier: dict[int, Row] = {}
        #: records of the file from an earlier attempt, and those with a step that were timed
        self._old, self._timed = 0, 0
        self._first: _Arrival | None = None
        self._last: _Arrival | None = None
        #: speed by step: the script's own, and that between the arrivals
        self._rates: dict[int, float] = {}
        self._speeds: dict[int, float | None] = {}
        #: losses of this attempt by step, as the script wrote them
        self._losses: dict[int, float] = {}
        # of the file that is read: the steps of records that have only an epoch, whether others
        # have a step, the script's name of each column, and remarks, one per kind
        self._epochs: dict[float, int] = {}
        self._counts_steps = False
        self._sources: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._said: set[str] = set()

    def restore(self) -> None:
        """Read the rows of earlier attempts."""
        for row in tables.read_rows(self._job.run_dir, "steps", self._job.trial_id):
            self.rows[row["step"]] = {k: v for k, v in row.items() if v is not None}
        self._earlier = self.rows
        names = {name for row in self.rows.values() for name in row}
        own = {name: name for name in names if _evaluation(name) in names - {name}}
        self._own = own | self._own

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
            self._earlier, self._old, self._timed = self.rows, 0, 0
        if at is None:
            self._old = len(reading.records)
        self._counts_steps = any("epoch" not in row for row in self._earlier.values())
        self._epochs, self._sources = {}, {}
        self._notes = {note: note for note in reading.notes}
        rows: dict[int, Row] = {}
        losses: dict[int, float] = {}
        summary: dict[str, float] = {}
        arrived: list[tuple[int, float | None]] = []
        for place, record in enumerate(reading.records):
            values = self._columns(numbers(record))
            number = self._step_of(values, rows)
            if number is None:
                if any(summary.get(name, value) != value for name, value in values.items()):
                    self._notes.setdefault("steps", _NO_STEPS)
                summary |= values
                continue
            samples = values.pop("samples", None)
            if samples is None and self._counts_steps and self._effective_batch is not None:
                samples = float(number * self._effective_batch)
            arrived.append((number, samples))
            if (loss := values.get("loss")) is not None and place >= self._old:
                if losses.setdefault(number, loss) != loss:
                    self._notes.setdefault(
                        "losses",
                        f"several losses of step {number}: the last one counts; write one record "
                        "per step, and only in one process",
                    )
                losses[number] = loss
            if (rate := finite_or_none(values.get("samples_per_s"))) is not None:
                self._rates[number] = rate
            row = rows.setdefault(number, {"trial_id": self._job.trial_id, "step": number})
            row |= {name: finite_or_none(value) for name, value in values.items()}
        self.summary |= summary
        self._time(arrived[self._timed :], at)
        self._timed = len(arrived)
        for number in rows.keys() & self._speeds.keys():
            rows[number].setdefault("samples_per_s", self._speeds[number])
        first, before = min(rows, default=math.inf), self.rows
        self.rows = {n: row for n, row in self._earlier.items() if n < first} | rows
        self._losses = {n: loss for n, loss in self._losses.items() if n < first} | losses
        self._check_losses(_OVERFLOWS)
        return [row for number, row in sorted(rows.items()) if row != before.get(number)]

    def _step_of(self, values: dict[str, float], rows: Mapping[int, Row]) -> int | None:
        """Remove and return the step of a record; None if it has neither step nor epoch.

        Without a step it is the epoch, if all are whole: from 1 if the first one is 0 and has a
        loss, since an evaluation before the training has none. Else such records are numbered;
        beside records with steps, they are of the last one.
        """
        step, epoch = (finite_or_none(values.get(name)) for name in ("step", "epoch"))
        values.pop("step", None)
        if step is not None:
            if step != int(step) or abs(step) >= 2**63:
                message = (
                    f"metrics: step = {step:g}: must be a whole number; write the number of steps, "
                    "and anything else by another name"
                )
                raise UnitError(self._job.trial_id, "error", message)
            self._counts_steps = True
            return int(step)
        if epoch is None or self._counts_steps:
            return None if epoch is None else max(rows or self._earlier)
        if not rows:
            earlier = {n: row.get("epoch") for n, row in self._earlier.items()}
            self._epochs = {e: n for n, e in earlier.items() if e is not None and e < epoch}
        if epoch not in self._epochs:
            number = 1 + max(self._epochs.values(), default=0)
            if all(each == int(each) for each in (*self._epochs, epoch)):
                shifts = (n - int(e) for e, n in self._epochs.items())
                number = int(epoch) + next(shifts, int(epoch == 0 and "loss" in values))
            self._epochs[epoch] = number
        return self._epochs[epoch]

    def _time(self, arrived: Sequence[tuple[int, float | None]], at: float | None) -> None:
        """Record when steps came, each with its samples if known, and the speed since those before.

        ``at`` is None if the time is unknown.
        """
        last = self._last
        step = max((number for number, _ in arrived), default=None)
        if at is None or step is None or (last is not None and step <= last.step):
            return
        samples = next((count for _, count in reversed(arrived) if count is not None), None)
        self._last = _Arrival(at, step, samples)
        self._first = self._first or self._last
        if last is not None:
            rate = _rate(last, self._last)
            self._speeds |= {number: rate for number, _ in arrived if number > last.step}

    def notes(self) -> list[str]:
        """Return the remarks since the last call: on lines, and on what is stored otherwise."""
        notes = [text for text in self._notes.values() if text not in self._said]
        self._said.update(notes)
        return notes

    def finish(self) -> None:
        """Raise FloatingPointError if the last loss is not finite."""
        self._check_losses(1)

    def _check_losses(self, number: int) -> None:
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
        taken = {column.name for column in TRIALS.columns if not column.name.startswith("eval_")}
        last = {k: v for k, v in values.items() if k not in taken | {"step", "loss", "lr"}}
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
            rate = rate or _rate(first, last)
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
