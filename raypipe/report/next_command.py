"""The next command of a run: its command with other values, further seeds or a new directory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from numbers import Integral

from raypipe.config.matrix import SEED, is_seed
from raypipe.report.about import About

_MATRIX, _RUN_DIR = "--matrix", "--run-dir"
#: begins the key of an argument of a function, which may be left out
_ARGUMENTS = "arguments."


def words_of(command: str) -> list[str]:
    """Return the words of a command."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def run_dir_of(command: str) -> str:
    """Return the run directory that a command names."""
    words = words_of(command)
    place = words.index(_RUN_DIR) + 1 if _RUN_DIR in words else len(words)
    return words[place] if place < len(words) else "RUN_DIR"


def elsewhere(command: str, *overrides: str) -> str:
    """Return the command in a new run directory, with further overrides or other values of them."""
    words = words_of(command)
    if _RUN_DIR in words:
        place = words.index(_RUN_DIR)
        words = [*words[:place], *words[place + 2 :]]
    return with_values(shlex.join(words), *overrides)


def with_values(
    command: str, *overrides: str, matrix: Sequence[str] = (), options: Sequence[str] = ()
) -> str:
    """Return a command with overrides, axes of a matrix and options, each key once.

    A key that the command has already gets its new value in place, others follow at the end.
    """
    words = words_of(command)
    if not words:
        return ""
    for text in overrides:
        words = _with_value(words, text, "")
    for text in matrix:
        words = _with_value(words, text, _MATRIX)
    return shlex.join([*words, *options])


def _with_value(words: Sequence[str], text: str, option: str) -> list[str]:
    """Return words with ``KEY=VALUE`` behind an option, or behind none.

    A key of the matrix may stand behind ``--matrix`` or be an override, such as ``matrix.runs``.
    """
    key, _, value = text.partition("=")
    behind = {key, f"axes.{key}"} if option else set()
    alone = {key, f"{_ARGUMENTS}{key}", key.removeprefix(_ARGUMENTS)}
    if option:
        alone = {f"matrix.{name}" for name in behind}
    split = [part for word in words for part in _split(word)]
    kept: list[str] = []
    place = None
    for word in split:
        name = word.partition("=")[0]
        is_behind = kept[-1:] == [_MATRIX]
        if "=" in word and name in (behind if is_behind else alone):
            if place is not None:  # an earlier one, which this one replaces
                del kept[place - (kept[place - 1] == _MATRIX) : place + 1]
            word, place = f"{name}={value}", len(kept)
        kept.append(word)
    return kept if place is not None else [*kept, *([option] if option else []), text]


def _split(word: str) -> list[str]:
    return [_MATRIX, word.removeprefix(f"{_MATRIX}=")] if word.startswith(f"{_MATRIX}=") else [word]


def more_seeds(about: About, count: int) -> str:
    """Return the command that adds seeds to this run, up to a number; empty if none is known.

    It is that of a matrix or of the calls of a function that has an argument ``seed``.
    """
    if words_of(about.command)[:1] != ["raypipe"]:
        return ""
    keys = [key for key in about.varied if is_seed(key)]
    listed = about.setting("matrix.axes") or {}
    if keys == [SEED] and SEED not in listed:
        return with_values(about.command, matrix=(f"runs={count}",))
    if len(keys) == 1 and keys[0] in listed:
        values = _further(listed[keys[0]], count)
        return with_values(about.command, matrix=(f"{keys[0]}={values}",)) if values else ""
    calls = about.tables.get("calls")
    if about.setting("function") is not None and not keys and calls is not None and SEED in calls:
        values = _further(calls[SEED].dropna().unique().tolist(), count)
        return with_values(about.command, f"{SEED}={_range(values)}") if values else ""
    return ""


def _further(seeds: Sequence[object], count: int) -> list[int]:
    """Return as many seeds, the given ones first; none if those are not integers."""
    known = sorted(int(seed) for seed in seeds if isinstance(seed, Integral))
    if len(known) < max(1, len(seeds)):
        return []
    return [*known, *range(known[-1] + 1, known[-1] + 1 + max(0, count - len(known)))]


def _range(values: Sequence[int]) -> str:
    """Return whole numbers as a range ``0..4`` if they are one."""
    if len(values) > 1 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}..{values[-1]}"
    return str(list(values))
