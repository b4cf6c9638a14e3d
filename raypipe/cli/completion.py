"""Completion of arguments in a shell: run directories, tables, stages and keys.

A completion never fails and prints nothing else: what cannot be read has no suggestions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

#: folders below the runs, one inside the other, and the suggestions
_DEPTH, _MOST = 3, 200


def run_directories(incomplete: str) -> list[str]:
    """Return the run directories below the runs, the newest first, and folders of that name."""
    from raypipe.commands import runs_location

    root = runs_location()
    found = [] if "://" in root else sorted(map(str, _below(Path(root), _DEPTH)), reverse=True)
    head = incomplete.rpartition("/")[0]
    with suppress(OSError):
        folders = [each for each in Path(head or ".").iterdir() if each.is_dir()]
        shown = (f"{head}/{each.name}" if head else each.name for each in folders)
        found += [f"{each}/" for each in sorted(shown) if not each.startswith(".")]
    matching = (each for each in found if each.startswith(incomplete))
    return list(dict.fromkeys(matching))[:_MOST]


def configurations(incomplete: str) -> list[str]:
    """Return YAML files, and folders that may have some."""
    head = incomplete.rpartition("/")[0]
    names: list[str] = []
    with suppress(OSError):
        for each in sorted(Path(head or ".").iterdir()):
            name = f"{head}/{each.name}" if head else each.name
            if each.suffix in (".yaml", ".yml"):
                names.append(name)
            elif each.is_dir() and not each.name.startswith((".", "_")):
                names.append(f"{name}/")
    return [name for name in names if name.startswith(incomplete)]


def tables(context: typer.Context, incomplete: str) -> list[str]:
    """Return the tables of the run directory of a command."""
    with suppress(OSError):
        folder = Path(str(context.params.get("run_dir")), "results")
        return sorted(each.name for each in folder.iterdir() if each.name.startswith(incomplete))
    return []


def keys(context: typer.Context, incomplete: str) -> list[str]:
    """Return the dotted keys of the configuration of a command, each with ``=``."""
    from raypipe.config.keys import keys_of

    with suppress(Exception), redirect_stdout(StringIO()):
        found = keys_of(_model(context))
        return [
            f"{key.name}="
            for key in found
            if not key.is_section and key.name.startswith(incomplete)
        ]
    return []


def stages(context: typer.Context, incomplete: str) -> list[str]:
    """Return the stages of the configuration of a command."""
    from raypipe.commands.configuration import read, resolve
    from raypipe.hardware import Hardware

    with suppress(Exception), redirect_stdout(StringIO()):  # an experiment may print
        document = read(_config(context))
        overrides = list(context.params.get("overrides") or ())
        configuration = resolve(document, overrides, "auto", [Hardware("", 1, 0, ())])
        names = (stage.name for stage in configuration.experiment.stages(configuration.settings))
        return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
    return []


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run directories among a folder and those below."""
    from raypipe.store.run_directory import is_run

    with suppress(OSError):  # a file, or another user's folder
        names = [each.name for each in folder.iterdir()]
        if is_run(names):
            yield folder
        elif depth:
            for name in names:
                yield from _below(folder / name, depth - 1)


def _model(context: typer.Context) -> type[BaseModel]:
    """Return the settings of the configuration that a command names."""
    from raypipe.commands.configuration import read, settings_model, stored_experiment

    return settings_model(stored_experiment(read(_config(context))))


def _config(context: typer.Context) -> str:
    """Return the configuration of a command, which click leaves out after an unfinished option."""
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    files = [word for word in words.split() if word.endswith((".yaml", ".yml"))]
    return str(context.params.get("config") or next(iter(files), ""))
