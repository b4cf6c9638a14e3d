"""Python API: the commands as functions, and the results of a run.

Errors have the text of the command line: a mistake is a :class:`~raypipe.errors.ConfigError`, a run
that failed a :class:`RunFailedError`. Ray goes on after a call, so that the next one of this
process starts at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.commands.results import existing
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT

if TYPE_CHECKING:
    import pandas as pd

    from raypipe.commands.request import Request
    from raypipe.config.document import Document

#: a configuration: its file, or its content
Config = str | os.PathLike[str] | Mapping[str, Any]
_ORIGIN = "rp.map"
#: columns that raypipe adds to every table, of less interest than the others
_ADDED = (RUN_ID.name, VARIANT.name, COMMAND_ID.name)


class RunFailedError(RuntimeError):
    """A stage failed; ``run`` has what is finished, and the failures."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Best:
    """The best result of a run.

    Attributes:
        metric: the table and the column, such as ``calls.accuracy``.
        better: ``lower`` or ``higher``.
        value: the number, a mean over repetitions if there are any.
        points: the settings that have it, by key; several if they are equally good.
        runs: the number of repetitions.
        text: the result as the end of a command prints it.

    """

    metric: str
    better: str
    value: float
    points: Sequence[Mapping[str, Any]]
    runs: int
    text: str


@dataclass(frozen=True)
class Run:
    """A run directory: its tables as data frames, its failures and its report."""

    directory: RunDirectory

    @property
    def run_dir(self) -> str:
        """The path or URI of the run directory."""
        return self.directory.shown

    @property
    def tables(self) -> list[str]:
        """The names of the tables."""
        return self.directory.list(self.directory.path("results"))

    def table(self, name: str) -> pd.DataFrame:
        """Return a results table, such as ``calls``, ``trials`` or ``steps``.

        Raises:
            ConfigError: there is no such table, or it is damaged.

        """
        from raypipe.commands.results import table

        found: pd.DataFrame = table(self.directory, name).to_pandas()
        last = [column for column in _ADDED if column in found.columns]
        return found[[*found.columns.difference(last, sort=False), *last]]

    def sql(self, query: str) -> pd.DataFrame:
        """Return the result of a SQL query over all tables, in DuckDB (extra ``sql``).

        Raises:
            ConfigError: the query is wrong, or DuckDB is not installed.

        """
        from raypipe.store.query import sql

        found: pd.DataFrame = sql(self.directory, query).to_pandas()
        return found

    @property
    def status(self) -> str:
        """``succeeded``, or the worst status of a stage."""
        statuses = list(self.table("stages")["status"])
        order = ("failed", "out_of_memory", "interrupted", "skipped")
        return next((status for status in order if status in statuses), "succeeded")

    @property
    def failures(self) -> pd.DataFrame:
        """The failed attempts, with their tracebacks."""
        return self.table("failures")

    def best(self, metric: str = "") -> Best | None:
        """Return the best result, that of the end of the command; None if no number is finite.

        Args:
            metric: a column or ``table.column`` that says what is better; by default the first one
                that has a finite number.

        Raises:
            ConfigError: there is no such metric, or a table is damaged.

        """
        from raypipe.commands.declarations import about

        with _messages_alone():
            found = about(self.directory).bests
        for each in found:
            if metric in ("", each.column.name, each.metric):
                points = [plain(dict(point.values)) for point in each.ranking[: each.ties]]
                key = each.key_result
                return Best(each.metric, key.better, key.value, points, each.runs, key.text)
        if not metric:
            return None
        known = ", ".join(dict.fromkeys(each.metric for each in found)) or "none"
        raise ConfigError(f"best: metric = {metric}: has no finite result (those with: {known})")

    def report(self) -> Path | str:
        """Write the report again; return the path of its page."""
        from raypipe.commands.report import report

        return report(self.directory.location)

    def __repr__(self) -> str:
        """Return the status and the run directory."""
        return f"<Run {self.run_dir}: {self.status}, tables: {', '.join(self.tables)}>"


def open(run_dir: str | os.PathLike[str]) -> Run:
    """Return a run that exists, by its path or URI. Raises ConfigError if there is none."""
    return Run(existing(os.fspath(run_dir)))


def run(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    profile: str = "auto",
    only: Sequence[str] = (),
    matrix: Mapping[str, Any] | None = None,
    address: str | None = None,
    time_budget: str | None = None,
    local: bool = False,
) -> Run:
    """Run an experiment, or continue it: ``raypipe run``.

    Args:
        config: the YAML file, or a mapping with the same content.
        overrides: values by dotted key, such as ``{"lda.runs": 2}``.
        run_dir: where results go; the same directory again continues that run.
        profile: ``auto`` (by the hardware), ``cpu``, ``gpu`` or a name from ``profiles``.
        only: run these stages and what they need.
        matrix: lists of values by dotted key; every combination runs.
        address: a Ray cluster; by default one on this machine.
        time_budget: such as ``2h``; the run ends in order before it is over.
        local: whether to run everything in this process, without Ray, where a debugger works.

    Raises:
        ConfigError: a mistake; nothing was started.
        RunFailedError: a stage failed; what is finished is kept.
        KeyboardInterrupt: it was interrupted, or its time is over.

    """
    given = {**(overrides or {}), **{f"matrix.{k}": v for k, v in (matrix or {}).items()}}
    where = {"run_dir": run_dir, "profile": profile, "address": address}
    more = {"only": only, "time_budget": time_budget, "local": local}
    return _executed(_request("run", config, given, **where, **more))


def sweep(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    profile: str = "auto",
    address: str | None = None,
    time_budget: str | None = None,
) -> Run:
    """Measure the points of the section ``sweep``: ``raypipe sweep``.

    ``run.table("recommendations")`` has the recommended settings. Arguments and errors are those of
    :func:`run`.
    """
    where = {"run_dir": run_dir, "profile": profile, "address": address}
    more = {"only": ["sweep"], "time_budget": time_budget}
    return _executed(_request("sweep", config, overrides, **where, **more))


def fit(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    stage: str | None = None,
    profile: str = "auto",
    address: str | None = None,
    card: str | None = None,
    precision: str | Sequence[str] = (),
    gradient_checkpointing: bool | None = None,
    cards_per_node: int | None = None,
    cards: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """Return the largest micro-batch of each precision that fits this device: ``raypipe fit``.

    With ``card`` nothing is trained: memory, speed and energy on that card are predicted.

    Args:
        config: the YAML file, or a mapping with the same content.
        overrides: values by dotted key.
        stage: the training stage; by default each of them.
        profile: the name of a profile.
        address: a Ray cluster.
        card: the card to predict for, such as ``RTX A6000``; ``all`` compares all cards.
        precision: of the prediction, one or several; by default each that the card supports.
        gradient_checkpointing: predict with it, or without it, alone; by default without it, and
            with it where the effective batch does not fit at once.
        cards_per_node: the number of cards; by default ``scaling.workers``.
        cards: a file of further cards and prices; by default that of RAYPIPE_CARDS.
        run_dir: a run whose table ``card_predictions`` receives the rows, next to its measurements.

    Raises:
        ConfigError: a mistake; nothing was started.

    """
    import pandas as pd

    request = _request("fit", config, overrides, profile=profile, address=address, run_dir=run_dir)
    if card is not None:
        from raypipe.commands.prediction import Wanted, predict

        with _messages_alone():
            wanted = [precision] if isinstance(precision, str) else precision
            given = card, cards_per_node, cards, stage, wanted, gradient_checkpointing
            rows = predict(request, Wanted(*given))
        return pd.DataFrame(rows).convert_dtypes()
    predicted = (gradient_checkpointing, cards_per_node, cards, run_dir)
    if precision or any(each is not None for each in predicted):
        raise ConfigError(
            "fit: precision, gradient_checkpointing, cards_per_node, cards and run_dir need card"
        )
    from raypipe.commands.fit import fit as fitted

    with _messages_alone():
        return pd.DataFrame(fitted(request, stage)).convert_dtypes()


def plan(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    profile: str = "auto",
    only: Sequence[str] = (),
) -> pd.DataFrame:
    """Return the stages that would run, what is done, and the expected time: ``raypipe plan``.

    Arguments and errors are those of :func:`run`; nothing is started.
    """
    from raypipe.commands.plan import plan as planned

    with _messages_alone():
        return planned(
            _request("plan", config, overrides, run_dir=run_dir, profile=profile, only=only)
        )


def map(
    function: Callable[..., Any] | str,
    arguments: Mapping[str, Any] | None = None,
    *,
    cpus: float = 1.0,
    gpus: float = 0.0,
    attempts: int = 3,
    time_limit_s: float | None = None,
    maximize: str | Sequence[str] = (),
    minimize: str | Sequence[str] = (),
    version: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    address: str | None = None,
    time_budget: str | None = None,
    local: bool = False,
) -> Run:
    """Call a function for every combination of its arguments: ``raypipe map``.

    Each call is a task. What it returns, a mapping of single values, is a row of the table
    ``calls`` with the arguments as further columns. Calls that are stored are not repeated.

    Args:
        function: the function, or ``module:name``.
        arguments: values by name. A list, a range or an array is an axis.
        cpus: CPUs per call; may be a fraction.
        gpus: GPUs per call; may be a fraction.
        attempts: attempts of a call whose worker dies or that exceeds its time limit.
        time_limit_s: seconds after which an attempt is ended.
        maximize: returned values of which higher is better.
        minimize: returned values of which lower is better.
        version: version of the results. By default 1, and a run directory is not continued once
            the function's source code changed.
        overrides: other settings by dotted key, such as ``matrix.search``.
        run_dir: where results go; the same directory again continues that run.
        address: a Ray cluster; by default one on this machine.
        time_budget: such as ``2h``.
        local: whether to call it in this process, without Ray, where a debugger works.

    Raises:
        ConfigError: a mistake; nothing was started.
        RunFailedError: a call failed; the others are finished.
        KeyboardInterrupt: it was interrupted, or its time is over.

    """
    from raypipe.config.document import Document
    from raypipe.functions import reference

    if isinstance(function, str):
        name, loaded = function, None
    else:
        name = reference.of_function(function)
        reference.check(function, name, _ORIGIN)
        loaded = None if reference.is_importable(name) else function
    if loaded is not None:
        from raypipe.functions.used import variables
        from raypipe.launch.pool import obstacle

        if reason := obstacle(loaded, variables(loaded)):
            raise ConfigError(f"{_ORIGIN}: function = {name}: {reason}")
    values = {
        "arguments": {key: plain(value) for key, value in (arguments or {}).items()},
        "cpus": cpus,
        "gpus": gpus,
        "attempts": attempts,
        "time_limit_s": time_limit_s,
        "maximize": [maximize] if isinstance(maximize, str) else list(maximize),
        "minimize": [minimize] if isinstance(minimize, str) else list(minimize),
        "version": version,
    }
    document = Document(_ORIGIN, "", name, values, {}, loaded)
    more = {"run_dir": run_dir, "address": address, "time_budget": time_budget, "local": local}
    return _executed(_request("run", document, overrides, **more))


def _request(
    command: str, config: Config | Document, overrides: Mapping[str, Any] | None, **more: Any
) -> Request:
    """Return the request of a command, with overrides as on the command line."""
    from raypipe.commands.request import Request
    from raypipe.config.document import Document, parse

    texts = [f"{key}={json.dumps(plain(value))}" for key, value in (overrides or {}).items()]
    if more.get("run_dir") is not None:
        more["run_dir"] = os.fspath(more["run_dir"])
    if isinstance(config, Mapping):
        config = parse(json.dumps(plain(config)), "config")
    path, document = ("", config) if isinstance(config, Document) else (os.fspath(config), None)
    return Request(command, path, texts, document=document, keep_cluster=True, **more)


@contextmanager
def _messages_alone() -> Iterator[None]:
    """Raise mistakes without the internal errors that led to them."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error)) from None


def _executed(request: Request) -> Run:
    """Run a command and return its run. Raises ConfigError, RunFailedError, KeyboardInterrupt."""
    from raypipe.commands.run import execute

    with _messages_alone():
        ended = execute(request)
    found = Run(ended.run_dir)
    if ended.status == 130:
        raise KeyboardInterrupt(ended.failure)
    if ended.status:
        raise RunFailedError(f"{ended.failure} (run directory: {found.run_dir})", found)
    return found


def plain(value: Any) -> Any:
    """Return ranges and arrays as lists, NumPy's scalars as Python's, and paths as text.

    Raises:
        ConfigError: a value that no file could hold.

    """
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist()) if value is not value.tolist() else value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{value!r:.100}: a value of type {type(value).__name__} cannot be a setting or an "
        "argument, since it has no stable text; give plain values, and build or load the object in "
        "the function"
    )
