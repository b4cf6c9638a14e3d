"""Experiment of a function: its settings, its one stage and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from raypipe.config.axes import values_of
from raypipe.config.matrix import SEED, value_text
from raypipe.config.settings import Operational, Settings
from raypipe.errors import UnitError
from raypipe.functions.reference import calls, check_signature
from raypipe.functions.returned_row import call, lacking
from raypipe.graph.experiment import Experiment, Stage, Unit, Units
from raypipe.graph.identity import SettingsView, canonical_json, fingerprint
from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.graph.unit_logs import Failure, brief
from raypipe.redaction import refuse_secrets, without_secrets
from raypipe.store.call_files import FILES, missing, of_stage
from raypipe.store.ledger import Ledger, Row
from raypipe.store.tables import ADDED, Column, Table

if TYPE_CHECKING:
    from raypipe.graph.context import StageContext

#: the stage, and its table
CALLS = "calls"
_WRITTEN = (
    Column("call", "text", "Name of the call: its arguments."),
    Column("duration_s", "real", "Time of the call.", "s"),
    Column("worker", "text", "Host and process that computed it."),
    Column("attempt", "integer", "Number of the attempt that succeeded, from 1."),
)
_RESERVED = (*ADDED, *(column.name for column in _WRITTEN), FILES)
_NAME_LENGTH = 120


class FunctionSettings(Settings):
    """Settings of a function experiment, at the top level of its file."""

    arguments: Operational[dict[str, Any]] = Field(default_factory=dict)
    """Arguments by name. A list, or a range such as 0..4 (both ends included), is an axis; every
    combination is a call. A list as one value is written in a list.
    """
    cpus: Operational[PositiveFloat] = 1.0
    """CPUs that a call reserves; may be a fraction."""
    gpus: Operational[NonNegativeFloat] = 0.0
    """GPUs that a call reserves; may be a fraction."""
    attempts: Operational[PositiveInt] = 3
    """Attempts of a call whose worker dies or that exceeds its time limit."""
    time_limit_s: Operational[PositiveFloat | None] = None
    """Seconds after which an attempt is ended."""
    maximize: Operational[tuple[str, ...]] = ()
    """Returned values of which higher is better, for the report."""
    minimize: Operational[tuple[str, ...]] = ()
    """Returned values of which lower is better, for the report."""
    version: Operational[PositiveInt | None] = None
    """Version of the results, part of each call's identity. By default 1, and a run directory is
    not continued once the function's source code changed.
    """

    @field_validator("maximize", "minimize", mode="before")
    @classmethod
    def _one_name(cls, names: Any) -> Any:
        return [names] if isinstance(names, str) else names

    @field_validator("arguments")
    @classmethod
    def _axes(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name, value in arguments.items():
            if not name.isidentifier():
                raise ValueError(f"{name!r}: is not the name of an argument")
            try:
                values_of(value)
                canonical_json(value)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{name}: {error}") from None
        refuse_secrets({name: values_of(value) or value for name, value in arguments.items()})
        return arguments

    @field_validator("minimize")
    @classmethod
    def _one_direction(cls, names: tuple[str, ...], info: Any) -> tuple[str, ...]:
        both = set(names) & set(info.data.get("maximize", ()))
        if both:
            raise ValueError(f"{', '.join(sorted(both))}: is in `maximize`, too")
        return names


def function_experiment(
    reference: str,
    function: Callable[..., Any] | None,
    settings: FunctionSettings | None = None,
) -> Experiment:
    """Return the experiment of a function.

    Args:
        reference: ``module:name``.
        function: the function; None if it is not to run, as for a report.
        settings: the settings, from which tables and report follow; None before they are known.

    """
    return Experiment(
        name=reference.removeprefix("__main__:").replace(":", "."),
        version=1,
        settings=FunctionSettings,
        stages=partial(_stages, reference, function),
        tables=(_table(settings or FunctionSettings()),),
        asked=partial(_asked, settings) if settings is not None else None,
    )


def _verify(settings: FunctionSettings, ledger: Ledger, unit: Unit) -> None:
    """Check that a stored call returned what ``maximize`` and ``minimize`` name.

    Calls that are not stored are checked when they return. Raises ValueError.
    """
    row, given = ledger.get(CALLS, unit.key), {*_RESERVED, *settings.arguments}
    returned = {name: value for name, value in (row or {}).items() if name not in given}
    if row is not None and (problem := lacking(returned, _numbers(settings))):
        raise ValueError(problem)


def _numbers(settings: FunctionSettings | SettingsView) -> tuple[str, ...]:
    """Return the names of the returned values that must be numbers."""
    return (*settings.maximize, *settings.minimize)


def _table(settings: FunctionSettings) -> Table:
    """Return the declaration of the table: what is returned is known once a call has ended.

    Calls have the order of the configuration; others follow.
    """
    about = "Returned by the function."
    better = [Column(name, "real", about, better="higher") for name in settings.maximize]
    better += [Column(name, "real", about, better="lower") for name in settings.minimize]
    row = "a call of the function; further columns are its arguments and what it returned"
    columns = (_WRITTEN[0], *better, *_WRITTEN[1:])
    axes = tuple(name for name in settings.arguments if name != SEED)
    values = {name: values_of(value) or [value] for name, value in settings.arguments.items()}
    places = {
        name: of_axis
        if isinstance(of_axis, range)
        else {repr(item): place for place, item in enumerate(of_axis)}
        for name, of_axis in values.items()
    }
    return Table(CALLS, row, columns, open=True, axes=axes, order=partial(_position, places))


def _position(places: Mapping[str, range | Mapping[str, int]], row: Row) -> tuple[int, ...]:
    """Return the places of the arguments of a row among the values of each axis."""
    return tuple(_place(axis, row.get(name)) for name, axis in places.items())


def _place(axis: range | Mapping[str, int], value: Any) -> int:
    if not isinstance(axis, range):
        return axis.get(repr(value), len(axis))
    return value - axis.start if type(value) is int and value in axis else len(axis)


def _stages(
    reference: str, function: Callable[..., Any] | None, settings: FunctionSettings
) -> list[Stage]:
    if function is None:
        raise ValueError(f"function = {reference}: is not available in this process")
    check_signature(function, tuple(settings.arguments), f"function = {reference}", _RESERVED)
    units = _units(settings)
    return [
        Stage(
            CALLS,
            partial(_run, function),
            units,
            reads=tuple(FunctionSettings.model_fields),
            workload=f"{len(units)} calls of {reference}",
            on_gpu=bool(settings.gpus),
            strict_code=settings.version is None,
            verify=partial(_verify, settings) if _numbers(settings) else None,
        )
    ]


def _units(settings: FunctionSettings) -> Units:
    number, arguments_of = calls(settings.arguments)
    version = settings.version or 1

    def parts(place: int) -> tuple[str, Row]:
        arguments = arguments_of(place)
        return f"{CALLS}/{_name_of(arguments)}", {"arguments": arguments, "version": version}

    return Units(range(number), parts)


def _asked(settings: FunctionSettings) -> set[str]:
    return {unit.key for unit in _units(settings)}


def _name_of(arguments: Mapping[str, Any]) -> str:
    """Return the name of a call; a long one is cut and ends in a hash."""
    name = ",".join(f"{key}={value_text(value)}" for key, value in sorted(arguments.items()))
    if len(name) <= _NAME_LENGTH and name.isprintable():
        return name or "once"
    printable = "".join(letter if letter.isprintable() else "_" for letter in name)
    return f"{printable[:_NAME_LENGTH]}~{fingerprint(dict(arguments))[:16]}"


def _run(function: Callable[..., Any], context: StageContext) -> None:
    settings, numbers = context.settings, _numbers(context.settings)
    options = PoolOptions(settings.cpus, settings.gpus, settings.time_limit_s, settings.attempts)
    todo, running = context.todo(), dict[str, Unit]()
    total, failures = len(context.stage.units), 0
    first: TaskResult | None = None  # that failed
    done = total - context.left
    context.begin(total, done)
    run_dir = context.run_dir
    place = run_dir.location, run_dir.variant, run_dir.variants
    is_alone = context.session.is_alone
    with of_stage(run_dir, CALLS, is_alone=is_alone), context.pool(options) as pool:
        shared = pool.share(function)

        def tasks() -> Iterator[tuple[Any, ...]]:
            for unit in todo:
                running[unit.key] = unit
                arguments = unit.literals["arguments"]
                yield unit.key, call, unit.key, place, _RESERVED, numbers, shared, arguments

        for batch in context.outcomes(pool, tasks()):
            returned = {r.key: r.value for r in batch if r.error is None}
            written = {key: row.pop(FILES) for key, row in returned.items() if FILES in row}
            lacks = {key: lacking(row, numbers) for key, row in returned.items()}
            # if not even the first calls have it, they are stored: probably the name is wrong
            wrong = next(iter(lacks), "") if not done and all(lacks.values()) else ""
            problems = {} if wrong else {key: text for key, text in lacks.items() if text}
            problems |= missing(run_dir, written)
            for key in problems.keys() & written.keys():
                run_dir.delete(run_dir.call_files(key))
            rows, units = dict[str, Row](), list[Unit]()
            for result in batch:
                unit, problem = running.pop(result.key), problems.get(result.key)
                if problem:
                    result = result._replace(error=problem, kind="invalid_value")
                    about = Failure(unit.key, result.attempt, "invalid_value", problem, "gave up")
                    context.fail(about)
                status = "succeeded" if result.error is None else "failed"
                given, name = unit.literals["arguments"], run_dir.trial_id(unit.key)
                values = {**(result.value or {}), "duration_s": result.duration_s}
                context.session.trackers.call(name, status, given, values)
                if result.error is not None:
                    first, failures = first or result, failures + 1
                    continue
                row = {"call": unit.key.partition("/")[2], **given, **without_secrets(values)}
                row |= {"worker": result.worker, "attempt": result.attempt}
                if unit.key in written:
                    row[FILES] = written[unit.key]
                rows[unit.key] = row
                units.append(unit)
            done += len(rows)
            context.finish_all(units, {CALLS: rows}, whole=True)
            if wrong:
                raise UnitError(wrong, "invalid_value", lacks[wrong])
            context.advance(done, f"{failures} failed" if failures else "")
    if first is not None:
        more = f" ({failures} of {total} calls failed)" if failures > 1 else ""
        message = f"{brief(first.error or '', 700)}{more}"
        raise UnitError(first.key, first.kind or "error", message, trace=first.trace)
