"""Statements of raypipe that only run with a GPU, and which of them tests execute.

``python -m tests.gpu.gpu_lines NAME=DATA_FILES ...`` prints how many of them each measurement
executed, and by function those that no measurement did. ``make gpu-coverage`` measures.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: `report` shows results on any machine
_LEFT_OUT = ("raypipe/report/",)
PACKAGE = Path(__file__).resolve().parents[2] / "raypipe"

#: conditions that hold only with a GPU, and conditions that hold only without
_WITH = re.compile(
    r"type == 'cuda'|\.is_cuda\b|cuda\.is_initialized|_gpu is not None|\.gpus\b|^gpus\b"
    r"|row\['gpus'\]|scaling\.gpus_per_worker$|\.gpu_problems"
)
_WITHOUT = re.compile(
    r"type != 'cuda'|type == 'cpu'|_gpu is None|capability is None|^not \S*gpus\b"
    r"|^not torch\.cuda\.is_initialized|^not \S*gpus_per_worker$"
)
#: calls that need a GPU or its driver
_CALLS = re.compile(r"torch\.cuda\.[a-zA-Z]|pynvml\.nvml|_cuda_getArchFlags")
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete)


@dataclass(frozen=True, order=True)
class Line:
    """A statement: its file, its function, and its first and last line."""

    file: str
    function: str
    number: int
    end: int


def gpu_lines() -> list[Line]:
    """Return the statements of raypipe that only run with a GPU."""
    found: list[Line] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE.parent).as_posix()
        if file.startswith(_LEFT_OUT):
            continue
        found += _of(ast.parse(path.read_text()).body, file, "", inside=False)
    return found


def _of(body: Iterable[ast.stmt], file: str, name: str, *, inside: bool) -> Iterator[Line]:
    """Yield those of a block; ``inside`` is whether all of it only runs with a GPU."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{statement.name}".lstrip(".")
            yield from _of(statement.body, file, inner, inside=inside)
        elif isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            without = bool(_WITHOUT.search(test))
            within = bool(_WITH.search(test)) and not without
            yield from _of(statement.body, file, name, inside=inside or within)
            yield from _of(statement.orelse, file, name, inside=inside or without)
            inside |= without and _leaves(statement.body)
        elif isinstance(statement, _SIMPLE):
            inside |= name != "" and _needs_gpu(statement)
            if inside and not _is_docstring(statement):
                yield Line(file, name, statement.lineno, statement.end_lineno or statement.lineno)
        else:
            handlers = getattr(statement, "handlers", [])
            blocks = [getattr(statement, each, []) for each in ("body", "orelse", "finalbody")]
            first = blocks[0][0] if blocks[0] else None
            needs = isinstance(first, _SIMPLE) and _needs_gpu(first)
            for block in (*blocks, *(handler.body for handler in handlers)):
                yield from _of(block, file, name, inside=inside)
            # what follows a call that needs a GPU, unless a handler goes on
            inside |= needs and all(_leaves(handler.body) for handler in handlers)


def _needs_gpu(statement: ast.stmt) -> bool:
    """Whether a statement calls what only a GPU or its driver has, under no own condition."""
    value = getattr(statement, "value", None) or getattr(statement, "exc", None)
    if value is None or any(isinstance(node, ast.IfExp) for node in ast.walk(value)):
        return False
    return bool(_CALLS.search(ast.unparse(value)))


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def executed(data_files: str) -> set[tuple[str, int]]:
    """Return the files and the lines that a measurement executed; ``data_files`` is a pattern."""
    from coverage import CoverageData

    found: set[tuple[str, int]] = set()
    pattern = Path(data_files)
    for name in pattern.parent.glob(f"{pattern.name}.*"):
        data = CoverageData(str(name))
        data.read()
        for path in data.measured_files():
            file = f"raypipe/{path.rpartition('/raypipe/')[2]}"
            found |= {(file, line) for line in data.lines(path) or ()}
    return found


def _is_in(line: Line, lines: set[tuple[str, int]]) -> bool:
    return any((line.file, number) in lines for number in range(line.number, line.end + 1))


def main(measurements: Sequence[str]) -> None:
    """Print the number of statements per measurement, and those that none executed."""
    statements = gpu_lines()
    print(f"{len(statements)} statements only run with a GPU")
    every: set[tuple[str, int]] = set()
    for measurement in measurements:
        name, _, data_files = measurement.partition("=")
        lines = executed(data_files)
        every |= lines
        print(f"{name}: {sum(_is_in(each, lines) for each in statements)}")
    print(f"together: {sum(_is_in(each, every) for each in statements)}")
    missing = [each for each in statements if not _is_in(each, every)]
    for (file, function), group in itertools.groupby(missing, lambda x: (x.file, x.function)):
        print(f"{file} {function}: {', '.join(str(each.number) for each in group)}")


if __name__ == "__main__":
    main(sys.argv[1:])
