"""Command of a script: placeholders, arguments and environment variables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raypipe.config.validation import did_you_mean
from raypipe.scripts.settings import ScriptStageSettings
from raypipe.training.batching import BatchPlan

#: settings of ``training`` and ``scaling`` that are placeholders under their own name
TRAINING = (
    *("precision", "steps", "epochs", "seed", "learning_rate", "optimizer", "weight_decay"),
    *("weight_decay_on", "warmup_steps", "schedule", "decay_steps", "min_lr_ratio", "clip_norm"),
    *("compile",),
    *("gradient_checkpointing", "log_every", "eval_every", "eval_batch", "checkpoint_every"),
)
#: whether the arithmetic is this one, for scripts with a flag each (``--bf16 true``)
PRECISIONS = ("tf32", "bf16", "fp16")
SIZES = ("micro_batch", "accumulation", "effective_batch")
SCALING = ("workers", "strategy", "threads")
PLACES = ("output_dir", "checkpoint_dir", "newest_checkpoint")
RESUME = "resume"
#: environment variables that change what raypipe does, also in a script that uses it
OWN = frozenset(
    ("RAYPIPE_CACHE", "RAYPIPE_CARDS", "RAYPIPE_FAULTS", "RAYPIPE_RUNS", "RAYPIPE_SEARCH_PATH")
)
#: names that a parameter cannot have
RESERVED = frozenset({*SIZES, *PRECISIONS, *SCALING, *PLACES, RESUME})

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
#: expansions of a shell that surely end where they seem to
_EXPANSION = r"\$\{\w+\}|\$\((?:(?!\bcase\b)[^()'\"`\\#\0$<])*\)"
#: a command of the shell that reads a placeholder among its arguments as code
_READS_CODE = (
    r"(?:^|(?<=[;&|(){}\n])|(?<=\b(?:do|if))|(?<=\b(?:then|else|elif)))"
    r"\s*(?:(?:command|builtin)\s+)?(?:eval|trap)\s(?=[^;&|\n]*\0)"
)
#: quotes and comments of a shell; NUL is a placeholder, a group what is not followed further
_QUOTES = re.compile(
    rf"({_READS_CODE}|"
    r"\\\n#|<<|\(\(|\[\[)|\\.#*|'[^']*'|(?<![^\s;&|()<>])#[^\n]*|\$?\0"
    rf"|\"(?:{_EXPANSION}|\\.|[^\"\\`$]|\$(?![({{\[]))*\"|{_EXPANSION}|(\$[({{'\[]|[\"'`])",
    re.DOTALL,
)
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "zsh", "fish"}
_CODE_OPTION = re.compile(r"-\w*c")


def placeholders(text: str) -> list[str]:
    """Return the names of the placeholders of a text. Raises ValueError for a stray brace."""
    names = []
    for part in _PART.finditer(text):
        if part[0] in "{}":
            raise ValueError(f"{text!r}: a single brace; write {{{{ and }}}} for braces")
        if part[1] is not None:
            names.append(part[1].strip())
    return names


def check_names(texts: Iterable[str], known: Collection[str], key: str) -> None:
    """Raise ValueError if a text has an unknown placeholder."""
    for text in texts:
        for name in placeholders(text):
            if name not in known:
                raise ValueError(
                    f"{key}: {{{name}}}: unknown placeholder{did_you_mean(name, sorted(known))} "
                    f"(allowed: {', '.join(sorted(known))}; {{{{ and }}}} are braces)"
                )


def flat(parameters: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return parameters by dotted name.

    Raises:
        ValueError: a value without a text, or two parameters of one name.

    """
    found: dict[str, Any] = {}
    for key, value in parameters.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner = flat(value, f"{name}.")
        elif all(map(_is_single, value if isinstance(value, list | tuple) else [value])):
            if not _is_passable(text_of(value)):
                raise ValueError(
                    f"parameters.{name} = {json.dumps(value)}: no program can receive this text; "
                    "leave out NUL and characters that are not Unicode"
                )
            inner = {name: value}
        else:
            raise ValueError(
                f"parameters.{name} = {json.dumps(value)}: must be a number, text, true or false, "
                "or a list of them"
            )
        if twice := found.keys() & inner.keys():
            raise ValueError(f"parameters.{min(twice)}: is given twice; give it once")
        found |= inner
    return found


def _is_single(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping | list | tuple)


def _is_passable(text: str) -> bool:
    return "\0" not in text and text == text.encode(errors="ignore").decode()


def setting_values(
    settings: ScriptStageSettings, plan: BatchPlan, steps: int | None
) -> dict[str, Any]:
    """Return the placeholders of the settings. Those without a value are not given.

    Args:
        settings: the stage's section.
        plan: the batch sizes.
        steps: the length in steps, which a trial may shorten; None if it is in epochs.

    """
    values = {name: getattr(settings.training, name) for name in TRAINING}
    taken = (name for name in SIZES if getattr(settings.training, name) is not None)
    values |= {name: getattr(plan, name) for name in (*taken, "workers")}
    values |= {name: settings.training.precision == name for name in PRECISIONS}
    values |= {"steps": steps, "strategy": settings.scaling.strategy}
    return {name: value for name, value in values.items() if value is not None}


def arguments(
    settings: ScriptStageSettings, values: Mapping[str, Any], *, resumes: bool
) -> list[str]:
    """Return the arguments that start the script; a value is never split or interpreted.

    An argument that is a list's placeholder becomes an argument per element. A shell receives
    values as its own arguments and the command with variables in their places.
    """
    resume = settings.resume if resumes else ""
    if settings.shell:
        taken: list[str] = []

        def variables(part: re.Match[str]) -> str:
            if part[1] is None:
                return part[0][0]
            if (name := part[1].strip()) == RESUME:
                return _PART.sub(variables, resume)
            value = values[name]
            several = value if isinstance(value, list | tuple) else [value]
            taken.extend(map(text_of, several))
            last = len(taken)
            return " ".join(f'"$raypipe_{n}"' for n in range(last - len(several) + 1, last + 1))

        line = _PART.sub(variables, settings.command)
        given = " ".join(f"raypipe_{n}=${{{n}}}" for n in range(1, len(taken) + 1))
        return ["/bin/sh", "-c", f"{given}; set --; {line}" if taken else line, "/bin/sh", *taken]
    found: list[str] = []
    for template in _split(settings.command):
        for part in _split(resume) if template == "{resume}" else [template]:
            name = part[1:-1]
            if part == f"{{{name}}}" and isinstance(values.get(name), list | tuple):
                found += [text_of(each) for each in values[name]]
            else:
                found.append(filled(part, values))
    return found


def environment(settings: ScriptStageSettings, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of the values and of the settings."""
    found = {variable(name): text_of(value) for name, value in values.items()}
    return found | {key: filled(text, values) for key, text in settings.environment.items()}


def variable(name: str) -> str:
    """Return the environment variable of a placeholder."""
    return "RAYPIPE_" + re.sub(r"\W", "_", name).upper()


def text_of(value: Any) -> str:
    """Return a value as the script receives it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(text_of(each) for each in value)
    return str(value)


def check_form(settings: ScriptStageSettings, key: str) -> None:
    """Raise ValueError if the command cannot be split, or places ``{resume}`` in an argument.

    Also if a shell would read the value of a placeholder as code.
    """
    for name in ("command", "resume"):
        try:
            parts = _split(getattr(settings, name))
        except ValueError as error:
            raise ValueError(f"{key}.{name}: {error}; quotes must be in pairs") from error
        for part in parts if not settings.shell and name == "command" else ():
            if RESUME in placeholders(part) and part != "{resume}":
                raise ValueError(
                    f"{key}.command: {part}: {{resume}} stands for whole arguments "
                    f"({key}.resume = {settings.resume!r}); leave a space around it"
                )
    if not _split(settings.command):
        raise ValueError(f"{key}.command: is empty")
    _check_values_are_no_code(settings, key)


def shell_code(settings: ScriptStageSettings) -> list[str]:
    """Return the texts of a command that a shell reads: all of it, or that of ``sh -c "..."``."""
    if settings.shell:
        return [settings.command, settings.resume]
    parts = _split(settings.command)
    options = [n for n, part in enumerate(parts) if _CODE_OPTION.fullmatch(part)]
    shells = [n for n in options if any(Path(each).name in _SHELLS for each in parts[:n])]
    return [text for n in shells for text in parts[n + 1 : n + 2]]


def _check_values_are_no_code(settings: ScriptStageSettings, key: str) -> None:
    """Raise ValueError if a shell would read the value of a placeholder."""
    for text in shell_code(settings):
        for name, is_free in zip(placeholders(text), _free(text), strict=True):
            whole = text == f"{{{name}}}"  # as an argument: its value is the code
            if is_free if settings.shell else whole:
                continue
            advice = f"write {{{name}}} outside of quotes and substitutions (it needs no quotes)"
            if not settings.shell:
                advice = "give the command without this shell, and shell: true"
            if name != RESUME:
                advice += f', or "${variable(name)}" within double quotes'
            raise ValueError(
                f"{key}.{'resume' if text == settings.resume else 'command'}: {{{name}}}: a shell "
                f"would change or run its value in this place; {advice}"
            )


def _free(text: str) -> list[bool]:
    """Return of each placeholder of a shell command whether it is outside of quotes and the like.

    Behind the first construct that is not followed further, such as a here-document, none is.
    """
    found: list[bool] = []
    clear = True
    bare = _PART.sub(lambda part: part[0][0] if part[1] is None else "\0", text)
    for token in _QUOTES.finditer(bare):
        clear = clear and token.lastindex is None
        found += [clear and token[0] == "\0"] * token[0].count("\0")
    return found


def script_of(command: str, directory: Path) -> str | None:
    """Return the script that a command names, relative to the directory if it is below it.

    It is the first argument that ends like a script (`.py`, `.sh`), a module after ``-m``, or
    the program itself if it lies below the directory. None if there is none.
    """
    parts = _split(command)
    for before, part in zip(["", *parts], parts, strict=False):
        if before == "-m":
            path = Path(*part.split("."))
            for found in (path.with_suffix(".py"), path / "__main__.py"):
                if (directory / found).is_file():
                    return found.as_posix()
        elif Path(part).suffix in (".py", ".sh") and not placeholders(part) and part[0] != "-":
            return part
    program = directory / parts[0]
    if program.is_file() and program.resolve().is_relative_to(directory.resolve()):
        return parts[0]
    return None


def _split(text: str) -> Sequence[str]:
    return shlex.split(text)


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with the values of its placeholders."""
    return _PART.sub(
        lambda part: part[0][0] if part[1] is None else text_of(values[part[1].strip()]), text
    )
