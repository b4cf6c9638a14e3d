"""The pages of the reference that follow from code: commands and the Python API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

import raypipe
from raypipe import cli

_BREAK = "\b"  # click: the next paragraph keeps its lines


def command_lines() -> Iterator[str]:
    """Yield the description, arguments and options of every command, from its ``--help``."""
    group: Any = typer.main.get_command(cli.app)
    for name, command in sorted(_commands(group, "raypipe")):
        yield from _command(name, command)


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")
        elif not command.hidden:
            yield f"{prefix} {name}", command


def _command(name: str, command: Any) -> Iterator[str]:
    parameters = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [_label(p) for p in parameters if p.param_type_name == "argument"]
    yield f"### {name}\n"
    yield f"```text\n{' '.join([name, *arguments, '[OPTIONS]'])}\n```\n"
    yield _prose(command.help) + "\n"
    yield "| argument or option | meaning |"
    yield "|---|---|"
    for parameter in parameters:
        if parameter.name != "help":
            yield f"| `{_cell(_label(parameter))}` | {_cell(_meaning(parameter))} |"
    yield ""
    if command.epilog:
        examples = command.epilog.replace(_BREAK, "").strip().removeprefix("Examples:")
        lines = [line.removeprefix("  ") for line in examples.strip("\n").splitlines()]
        yield "\n".join(["```bash", *lines, "```", ""])


def _label(parameter: Any) -> str:
    """Return a parameter as a user writes it; independent of the version of click."""
    value = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        dots = "..." if parameter.nargs < 0 else ""
        return f"{value}{dots}" if parameter.required else f"[{value}]{dots}"
    names = " / ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {value}"


def _meaning(parameter: Any) -> str:
    text = parameter.help or ""
    shown = getattr(parameter, "show_default", False) and isinstance(parameter.default, str | int)
    if shown and not getattr(parameter, "is_flag", False):
        text += f" Default: `{parameter.default}`."
    return text + " Required." * parameter.required


def _prose(text: str) -> str:
    """Return a help text as paragraphs; those that keep their lines become blocks."""
    paragraphs = []
    for paragraph in (text or "").strip().split("\n\n"):
        if paragraph.startswith(_BREAK):
            paragraphs.append(f"```text\n{paragraph.removeprefix(_BREAK).strip()}\n```")
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def api_lines() -> Iterator[str]:
    """Yield a directive of mkdocstrings for every public name."""
    for name in raypipe.__all__:
        if not name.startswith("_"):
            yield f"::: raypipe.{name}\n"
