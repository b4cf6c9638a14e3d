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

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from raypipe.config.settings import Level, Operational
from raypipe.config.validation import did_you_mean, dig
from raypipe.training import batching
from raypipe.training.batching import BatchPlan
from raypipe.training.settings import TrainStageSettings

#: settings of ``training`` that are placeholders under their own name
TRAINING = (
    *("precision", "steps", "epochs", "seed", "learning_rate", "optimizer", "weight_decay"),
    *("weight_decay_on", "warmup_steps", "schedule", "decay_steps", "min_lr_ratio", "clip_norm"),
    *("compile",),
    *("gradient_checkpointing", "log_every", "eval_every", "eval_batch", "checkpoint_every"),
)
#: whether the arithmetic is this one, for scripts with a flag each (``--bf16 true``)
PRECISIONS = ("tf32", "bf16", "fp16")
SIZES = batching.KEYS
RESUME = "resume"
#: names that a parameter cannot have
PLACES = ("output_dir", "checkpoint_dir", "newest_checkpoint")
RESERVED = frozenset({*SIZES, *PRECISIONS, "workers", "strategy", "threads", *PLACES, RESUME})
#: environment variables that change what raypipe does, also in a script that uses it
OWN = frozenset(
    ("RAYPIPE_CACHE", "RAYPIPE_CARDS", "RAYPIPE_FAULTS", "RAYPIPE_RUNS", "RAYPIPE_SEARCH_PATH")
)
#: names of environment variables with values
VARIABLE = re.compile(r"\bRAYPIPE_\w+")

#: settings that only raypipe's own training loop has, with what to do instead
_REFUSED = {
    "training.init_from": "pass the path of the weights as a parameter",
    "training.betas": "pass them as a parameter",
    "training.weights": "pass it as a parameter",
    "training.monitor": "let the script choose its best model",
    "training.keep_checkpoints": "let the script delete old checkpoints",
    "loader.workers": "reserve cores with scaling.cpus_per_worker, pass a number as a parameter",
    "loader.prefetch": "pass it as a parameter",
    "loader.pin_memory": "pass it as a parameter",
    "memory_trial": "a script does not know its longest samples",
}

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
#: parts of a shell's command without a placeholder, which is NUL here, that end where they seem to
_EXPANSION = r"\$(?:\w+|[?@*!])|\$\{\w+\}|\$\((?:(?!\bcase\b)[^()'\"`\\#\0$<])*\)"
_CLOSED = re.compile(
    rf"\\[^\0]|'[^'\0]*'|{_EXPANSION}|\"(?:{_EXPANSION}|\\[^\0]|[^\"\\`$\0])*\"", re.DOTALL
)
#: what may put a placeholder behind it where a shell changes its value, or runs it
_UNSAFE = re.compile(r"['\"`\\$#]|<<|\(\(|\[\[|\b(?:eval|trap)\b[^;&|\n]*\0")
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "zsh", "fish"}
_CODE_OPTION = re.compile(r"-\w*c")


class ScriptStageSettings(TrainStageSettings):
    """A script as a training stage. `training` and `scaling` keep their names and meanings.

    Every value that is given must reach the script: by a placeholder of the command, or by its
    environment variable `RAYPIPE_NAME`, which one of `files` then contains.
    """

    command: str = Field(min_length=1)
    """Command of the training, with placeholders such as `{micro_batch}`; `{{` and `}}` are braces.
    It runs in the current directory.
    """
    shell: bool = False
    """Whether a shell (`sh -c`) runs the command. Values of placeholders arrive as they are and
    need no quotes. Without it, the command is split into arguments.
    """
    metrics: str | None = Field(None, min_length=1)
    """File with the metrics that the script writes: JSON lines, CSV (.csv) or the Trainer's
    `trainer_state.json`, relative to `{output_dir}`; of a pattern (`**/*.csv`) the newest file.
    `stdout` for JSON lines on the standard output.
    """
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the script's metrics by column, such as `loss: train/nll`, where raypipe does not
    know them.
    """
    files: Operational[tuple[str, ...] | None] = None
    """Files and patterns (`src/**/*.py`) whose content decides the result; by default the script
    that the command names, and the modules next to it that it imports.
    """
    resume: Operational[str] = "--resume {checkpoint_dir}"
    """Arguments that `{resume}` stands for if `{checkpoint_dir}` has files; else it stands for
    nothing. `{newest_checkpoint}` is the newest file or folder there.
    """
    grace_s: Operational[NonNegativeFloat] = 10.0
    """Seconds between SIGTERM, on which the script may save a checkpoint, and SIGKILL."""
    time_limit_s: Operational[PositiveFloat | None] = None
    """Seconds after which an attempt is ended as failed."""

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

    @model_validator(mode="after")
    def _only_what_a_script_can_honor(self) -> ScriptStageSettings:
        for key, advice in _REFUSED.items():
            section, _, name = key.rpartition(".")
            owner = getattr(self, section) if section else self
            if getattr(owner, name) not in (None, type(owner).model_fields[name].default):
                raise ValueError(f"{key}: does not apply to a script; {advice}")
        if "shorten" in self.on_oom:
            raise ValueError("on_oom: shorten does not apply to a script")
        return self


def placeholders(text: str) -> list[str]:
    """Return the names of the placeholders of a text. Raises ValueError for a stray brace."""
    names = []
    for part in _PART.finditer(text):
        if part[0] in "{}":
            raise ValueError(f"{text!r}: a single brace; write {{{{ and }}}} for braces")
        if part[1] is not None:
            names.append(part[1].strip())
    return names


def check_names(text: str, known: Collection[str], key: str) -> None:
    """Raise ValueError if a text has an unknown placeholder."""
    for name in placeholders(text):
        if name not in known:
            raise ValueError(
                f"{key}: {{{name}}}: unknown placeholder{did_you_mean(name, sorted(known))} "
                f"(allowed: {', '.join(sorted(known))}; {{{{ and }}}} are braces)"
            )


def flat(parameters: Mapping[str, Any], prefix: str = "parameters.") -> dict[str, Any]:
    """Return parameters by dotted name.

    Raises:
        ValueError: a value without a text, or two parameters of one name.

    """
    values: dict[str, Any] = {}
    for key, value in parameters.items():
        name, inner = f"{prefix}{key}", {key: value}
        several = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, Mapping):
            inner = {f"{key}.{below}": each for below, each in flat(value, f"{name}.").items()}
        elif any(each is None or isinstance(each, Mapping | list | tuple) for each in several):
            raise ValueError(
                f"{name} = {json.dumps(value)}: must be a number, text, true or false, or a list "
                "of them"
            )
        elif "\0" in (text := text_of(value)) or text != text.encode(errors="ignore").decode():
            raise ValueError(
                f"{name} = {json.dumps(value)}: no program can receive this text; leave out NUL "
                "and characters that are not Unicode"
            )
        if twice := values.keys() & inner.keys():
            raise ValueError(f"{prefix}{min(twice)}: is given twice; give it once")
        values |= inner
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
    """Return the arguments that start the script; a value is never split or interpreted.

    An argument that is a list's placeholder becomes an argument per element. In a command for a
    shell, values are quoted.
    """
    resume = settings.resume if resumes else ""
    if settings.shell:

        def quoted(part: re.Match[str]) -> str:
            name = part[1] and part[1].strip()
            if name == RESUME:
                return _PART.sub(quoted, resume)
            if name is None:
                return part[0][0]
            beside = part.string[: part.start()][-1:] + part.string[part.end() :][:1]
            value = values[name]  # a list within a word is one text
            texts = [text_of(value)] if beside.strip() else _texts(value)
            return " ".join("'" + text.replace("'", "'\"'\"'") + "'" for text in texts)

        return ["/bin/sh", "-c", _PART.sub(quoted, settings.command)]
    given: list[str] = []
    for template in shlex.split(settings.command):
        for part in shlex.split(resume) if template == "{resume}" else [template]:
            value = values.get(part[1:-1]) if part.startswith("{") else None
            is_list = isinstance(value, list | tuple) and part.endswith("}")
            given += _texts(value) if is_list else [filled(part, values)]
    return given


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
        variable(RESUME): values["newest_checkpoint"],
        **{variable(name): text_of(value) for name, value in values.items()},
    }


def variable(name: str) -> str:
    """Return the environment variable of a placeholder."""
    return "RAYPIPE_" + re.sub(r"\W", "_", name).upper()


def text_of(value: Any) -> str:
    """Return a value as the script receives it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(_texts(value)) if isinstance(value, list | tuple) else str(value)


def _texts(value: Any) -> list[str]:
    return [text_of(each) for each in (value if isinstance(value, list | tuple) else [value])]


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with the values of its placeholders."""
    return _PART.sub(
        lambda part: part[0][0] if part[1] is None else text_of(values[part[1].strip()]), text
    )


def check_form(settings: ScriptStageSettings, key: str) -> None:
    """Raise ValueError if the command cannot be split, or places ``{resume}`` in an argument.

    Also if a shell would read the value of a placeholder as code.
    """
    for name in ("command", "resume"):
        try:
            parts = shlex.split(getattr(settings, name))
        except ValueError as error:
            raise ValueError(f"{key}.{name}: {error}; quotes must be in pairs") from error
        if name == "command" and not parts:
            raise ValueError(f"{key}.command: is empty")
        for part in parts if not settings.shell and name == "command" else ():
            if RESUME in placeholders(part) and part != "{resume}":
                raise ValueError(
                    f"{key}.command: {part}: {{resume}} stands for whole arguments "
                    f"({key}.resume = {settings.resume!r}); leave a space around it"
                )
    for text in shell_code(settings):
        names, clear = placeholders(text), settings.shell
        bare = _PART.sub(lambda part: part[0][0] if part[1] is None else "\0", text)
        if clear and names:
            clear = _UNSAFE.search(_CLOSED.sub("x", bare)) is None
        elif names:  # of `sh -c {code}`, where the value itself is the code
            clear = bare == "\0"
        if names and not clear:
            advice = "write placeholders outside of quotes, substitutions and comments"
            if not settings.shell:
                advice = "give the command without this shell, and shell: true"
            where = "resume" if text == settings.resume else "command"
            raise ValueError(
                f"{key}.{where}: {{{names[0]}}}: a shell could change or run its value in this "
                f'command; {advice}, or "${variable(names[0])}" within double quotes'
            )


def shell_code(settings: ScriptStageSettings) -> list[str]:
    """Return the texts of a command that a shell reads: all of it, or that of ``sh -c "..."``."""
    if settings.shell:
        return [settings.command, settings.resume]
    parts = shlex.split(settings.command)
    return [
        code
        for n, (option, code) in enumerate(pairwise(parts))
        if _CODE_OPTION.fullmatch(option) and any(Path(p).name in _SHELLS for p in parts[:n])
    ]


def script_of(command: str, directory: Path) -> str | None:
    """Return the script that a command names, relative to the directory if it is below it.

    It is the first argument that ends like a script (`.py`, `.sh`), a module after ``-m``, or
    the program itself if it lies below the directory. None if there is none.
    """
    parts = shlex.split(command)
    for before, part in zip(["", *parts], parts, strict=False):
        if before == "-m":
            path = Path(*part.split("."))
            for file in (path.with_suffix(".py"), path / "__main__.py"):
                if (directory / file).is_file():
                    return file.as_posix()
        elif Path(part).suffix in (".py", ".sh") and not placeholders(part) and part[0] != "-":
            return part
    program = directory / parts[0]
    if program.is_file() and program.resolve().is_relative_to(directory.resolve()):
        return parts[0]
    return None
