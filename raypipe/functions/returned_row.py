"""One call in a task: what the function returned, as the values of a row."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from raypipe.config.validation import did_you_mean
from raypipe.errors import UnitError
from raypipe.store import call_files

_NO_ROW = (
    "the function returned {}; return a mapping of single values, such as {{'accuracy': 0.93}}"
)
_MOST = 2**63


def call(
    key: str,
    run: tuple[Any, ...],
    reserved: Collection[str],
    numbers: Iterable[str],
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Call a function; return its values by name, and as ``files`` what it wrote, if anything.

    Args:
        key: the unit of the call.
        run: the fields of the run directory, for the files.
        reserved: names that it must not return.
        numbers: names whose value must be a number, if it is returned.
        function: the function.
        arguments: its arguments by name.

    Raises:
        UnitError: ``invalid_value``, it returned something else than a row.

    """
    with call_files.of_call(run, key) as files:
        try:
            returned = function(**arguments)
        except SystemExit as error:  # would end the worker
            raise RuntimeError(f"the function called sys.exit({error.code!r})") from error
        try:
            row = row_of(returned, arguments, reserved, numbers)
        except ValueError as error:
            raise UnitError(key, "invalid_value", str(error)) from None
        return row | files.finish()


def row_of(
    returned: Any,
    arguments: Mapping[str, Any],
    reserved: Collection[str] = (),
    numbers: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the values of a row: those of a mapping, or a single one as ``value``.

    NumPy's and torch's scalars become Python's, decimals and fractions the nearest float, dates
    text. A masked value and the missing values of pandas are None.

    Raises:
        ValueError: it is not a row, a name is also that of an argument or of another column, or
            a value must be a number and is not.

    """
    if returned is None:
        raise ValueError(_NO_ROW.format("nothing (None)"))
    if not isinstance(returned, Mapping):
        returned = {"value": _single(returned)}
    if not returned:
        raise ValueError(_NO_ROW.format("an empty mapping"))
    row: dict[str, Any] = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ValueError(f"the function returned the key {name!r}; must be printable text")
        row[name] = _single(value, f" for {name!r}")
        if name in reserved:
            raise ValueError(
                f"the function returned {name!r}, which is a column that raypipe writes; rename it"
            )
        if name in arguments and row[name] != arguments[name]:
            raise ValueError(
                f"the function returned {name!r}, which is also an argument; rename it"
            )
    named = [name for name in numbers if name in row]
    if problem := lacking(row, named):
        raise ValueError(problem)
    row |= {name: float(row[name]) for name in named}
    return {name: value for name, value in row.items() if name not in arguments}


def lacking(returned: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return which number of ``maximize`` and ``minimize`` a call did not return; empty if none."""
    for name in names:
        value = returned.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            given = f"{value!r} for {name!r}" if name in returned else f"no {name!r}"
            hint = "" if name in returned else did_you_mean(name, list(returned))
            return (
                f"the function returned {given}, but `maximize` or `minimize` names it: return a "
                f"number (returned: {', '.join(returned)}){hint}"
            )
    return ""


def _single(value: Any, of: str = "") -> Any:
    """Return a plain value; ``of`` names it in messages. Raises ValueError for any other one."""
    if value is None or isinstance(value, bool | str | float):
        return float(value) if isinstance(value, float) else value
    pandas = sys.modules.get("pandas")  # not imported for those who return nothing of it
    if pandas is not None and (value is pandas.NA or value is pandas.NaT):  # NaT is also a date
        return None
    if isinstance(value, Integral):
        if not -_MOST <= int(value) < _MOST:
            raise ValueError(_NO_ROW.format(f"an integer of more than 64 bits{of}"))
        return int(value)
    if isinstance(value, Real | Decimal):  # also a long double, which `tolist` leaves as it is
        return float(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if getattr(value, "ndim", None) == 0 and hasattr(value, "tolist"):
        is_date = getattr(value.dtype, "kind", "") == "M"  # `tolist` makes nanoseconds an integer
        single = value.tolist()  # unlike `item`, None for a masked value
        return _single(str(value) if is_date and single is not None else single, of)
    raise ValueError(_NO_ROW.format(f"a value of type {type(value).__name__}{of}"))
