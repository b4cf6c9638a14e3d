"""Command of a script: its settings, placeholders, arguments and environment variables."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat

from raypipe.config.axes import dotted
from raypipe.config.settings import Level, Operational
from raypipe.config.validation import did_you_mean, dig
from raypipe.training import batching
from raypipe.training.batching import BatchPlan
from raypipe.training.settings import TrainingSettings, TrainStageSettings

SIZES = batching.KEYS
#: settings of ``training`` that raypipe's own loop alone has
_OWN_LOOP = ("init_from", "weights", "monitor", "keep_checkpoints", "keep_state")
#: settings of ``training`` that are placeholders under their own name
TRAINING = tuple(key for key in TrainingSettings.model_fields if key not in {*SIZES, *_OWN_LOOP})
#: whether the arithmetic is this one, for scripts with a flag each (``--bf16 true``)
PRECISIONS = ("tf32", "bf16", "fp16")
RESUME = "resume"
#: names that a parameter cannot have
PLACES = ("output_dir", "checkpoint_dir")
RESERVED = frozenset({*SIZES, *PRECISIONS, "workers", "strategy", "threads", *PLACES, RESUME})

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "zsh", "fish"}
_CODE_OPTION = re.compile(r"-\w*c")


class ScriptStageSettings(TrainStageSettings):
    """A script as a training stage. `training` and `scaling` keep their names and meanings.

    Every value that is given must reach the script, by a placeholder of the command.
    """

    command: str = Field(min_length=1)
    """Command of the training, with placeholders such as `{micro_batch}`; `{{` and `}}` are braces.
    It runs in the current directory.
    """
    metrics: str | None = Field(None, min_length=1)
    """File with the metrics that the script writes: lines of JSON, or CSV (.csv), relative to
    `{output_dir}`. `stdout` for JSON lines on the standard output.
    """
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the script's metrics by column, such as `loss: train/nll`."""
    files: Operational[tuple[str, ...] | None] = None
    """Files and patterns (`src/**/*.py`) whose content decides the result; by default the script
    that the command names, and the modules next to it that it imports.
    """
    resume: Operational[str] = "--resume {checkpoint_dir}"
    """Arguments that `{resume}` stands for if `{checkpoint_dir}` has files; else it stands for
    nothing.
    """
    grace_s: Operational[NonNegativeFloat] = 10.0
    """Seconds between SIGTERM, on which the script may save a checkpoint, and SIGKILL."""

    @classmethod
    def settle(cls, name: str, values: Any, levels: Sequence[Level]) -> None:
        """Settle the length and the effective batch; batch sizes that nobody gives stay open.

        Which of them the script takes is known to its stage, which then sets them.
        """
        given = {key: dig(values, "training", key) for key in SIZES}
        super().settle(name, values, levels)
        if isinstance(training := dig(values, "training"), dict):
            if given["micro_batch"] is None and given["effective_batch"] is None:
                training |= given
            training |= {key: None for key in ("micro_batch", "accumulation") if given[key] is None}

    def fixed_by(self, length: int) -> str | None:
        """Return why a training of this length is not the beginning of a longer one."""
        del length
        return "what a script does with its length is not known"


def flat(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by dotted name.

    Raises:
        ValueError: a value without a text, or two parameters of one name.

    """
    values: dict[str, Any] = {}
    for key, value in dotted(parameters, lambda _: False):
        name, several = f"parameters.{key}", value if isinstance(value, list | tuple) else [value]
        problem = ""
        if any(each is None or isinstance(each, Mapping | list | tuple) for each in several):
            problem = "must be a number, text, true or false, or a list of them"
        elif "\0" in (text := text_of(value)) or text != text.encode(errors="ignore").decode():
            problem = "no program can receive this text; leave out NUL and characters that are not "
            problem += "Unicode"
        elif key.replace(".", "_") in (each.replace(".", "_") for each in values):
            problem = "has the name of another parameter; give it another one"
        if problem:
            raise ValueError(f"{name} = {json.dumps(value)}: {problem}")
        values[key] = value
    return values


def setting_values(
    settings: ScriptStageSettings, plan: BatchPlan, steps: int | None
) -> dict[str, Any]:
    """Return the placeholders of the settings. Those without a value are not given.

    Args:
        settings: the stage's section.
        plan: the batch sizes.
        steps: the length in steps, which a trial may shorten; None if it is in epochs.

    """
    training = settings.training
    values = {name: getattr(training, name) for name in TRAINING}
    values |= {name: getattr(training, name) and getattr(plan, name) for name in SIZES}
    values |= {name: training.precision == name for name in PRECISIONS}
    values |= {"steps": steps, "workers": plan.workers, "strategy": settings.scaling.strategy}
    return {name: value for name, value in values.items() if value is not None}


def arguments(
    settings: ScriptStageSettings, values: Mapping[str, Any], *, resumes: bool
) -> list[str]:
    """Return the arguments that start the script; a value is never split or interpreted."""
    resume = shlex.split(settings.resume) if resumes else []
    parts = (resume if each == "{resume}" else [each] for each in shlex.split(settings.command))
    return [filled(part, values) for group in parts for part in group]


def environment(values: Mapping[str, Any], *, uses_gpus: bool) -> dict[str, str]:
    """Return all environment variables of the script."""
    binaries, threads = str(Path(sys.executable).parent), str(values["threads"])
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of Ray's numbers
        **os.environ,
        "PATH": os.pathsep.join([binaries, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
        **({} if uses_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        **{f"RAYPIPE_{name.upper()}": values[name] for name in PLACES},
    }


def text_of(value: Any) -> str:
    """Return a value as the script receives it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(text_of, value)) if isinstance(value, list | tuple) else str(value)


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with the values of its placeholders."""
    return _PART.sub(
        lambda part: part[0][0] if part[1] is None else text_of(values[part[1].strip()]), text
    )


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; quotes must be in pairs") from error


def placeholders(settings: ScriptStageSettings, known: Collection[str], stage: str) -> set[str]:
    """Return the names of the placeholders in the texts that are used.

    Raises:
        ValueError: a text cannot be split, has an unknown placeholder, or one whose value a shell
            would read as code, or ``{resume}`` within an argument.

    """
    where, in_command = f"{stage}.command", {*known, RESUME}
    names = {*_names(settings.command, where, in_command)}
    resume = _names(settings.resume, f"{stage}.resume", known)
    _names(settings.metrics or "", f"{stage}.metrics", known)
    parts, _ = _split(settings.command, where), _split(settings.resume, f"{stage}.resume")
    if not parts:
        raise ValueError(f"{where}: is empty")
    for part in parts:
        if RESUME in _names(part, where, in_command) and part != "{resume}":
            advice = f"({stage}.resume = {settings.resume!r}); leave a space around it"
            raise ValueError(f"{where}: {part}: {{resume}} stands for whole arguments {advice}")
    for code in _shell_code(parts):
        inside = _names(code, where, in_command)
        if inside and code.strip("{} ") != inside[0]:  # of `sh -c {code}` the value is the code
            raise ValueError(
                f"{where}: {{{inside[0]}}}: a shell would read its value as code; write "
                f"it as an argument of the shell: '... \"$1\" ...' _ {{{inside[0]}}}"
            )
    return names.union(resume if RESUME in names else ())


def _names(text: str, where: str, known: Collection[str]) -> list[str]:
    """Return the names of a text's placeholders. Raises ValueError for others than the known."""
    names = list[str]()
    for part in _PART.finditer(text):
        if part[0] in "{}":
            raise ValueError(f"{where}: {text!r}: a single brace; write {{{{ and }}}} for braces")
        if part[1] is not None:
            names.append(part[1].strip())
            if names[-1] not in known:
                near, allowed = did_you_mean(names[-1], sorted(known)), ", ".join(sorted(known))
                raise ValueError(
                    f"{where}: {{{names[-1]}}}: unknown placeholder{near} (allowed: {allowed}; "
                    "{{ and }} are braces)"
                )
    return names


def _shell_code(parts: Sequence[str]) -> list[str]:
    """Return the arguments of a command that a shell reads: those of ``sh -c "..."``."""
    return [
        code
        for n, (option, code) in enumerate(pairwise(parts))
        if _CODE_OPTION.fullmatch(option) and any(Path(p).name in _SHELLS for p in parts[:n])
    ]


def script_of(command: str, directory: Path) -> str | None:
    """Return the script that a command names, relative to the directory if it is below it.

    It is the first argument that ends like a script (`.py`, `.sh`), or the program itself if it
    lies below the directory. None if there is none, or it is a module there (`-m`).
    """
    parts = shlex.split(command)
    for before, part in pairwise(["", *parts]):
        module = directory / part.replace(".", "/")
        if before == "-m" and (module.is_dir() or module.with_suffix(".py").is_file()):
            return None
        if Path(part).suffix in (".py", ".sh") and "{" not in part and part[0] != "-":
            return part
    program = directory / parts[0]
    if program.is_file() and program.resolve().is_relative_to(directory.resolve()):
        return parts[0]
    return None
