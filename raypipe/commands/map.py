"""``raypipe map``: a function and its arguments as a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raypipe.commands.time_budget import seconds_of
from raypipe.config.document import Document
from raypipe.errors import ConfigError
from raypipe.functions import reference

#: names of the command line, and of a call in Python, in messages
_COMMAND, _CALL = "command line", "rp.map"


def document_of(
    function: Callable[..., Any] | str,
    arguments: Mapping[str, Any] | Sequence[str],
    options: Mapping[str, Any],
) -> tuple[Document, list[str]]:
    """Return the configuration of a function, and its arguments as overrides.

    Args:
        function: the function, or ``module:function``.
        arguments: values by name, which become part of the configuration; or texts ``name=value``
            for arguments of the function and ``dotted.key=value`` for settings.
        options: the options of the command.

    Raises:
        ConfigError: a mistake.

    """
    name, loaded = (function, None) if isinstance(function, str) else _of_process(function)
    values = dict(options)
    limit = values.pop("time_limit")
    values["time_limit_s"] = seconds_of(limit, "--time-limit") if isinstance(limit, str) else limit
    if isinstance(arguments, Mapping):
        values["arguments"] = dict(arguments)
        return Document(_CALL, "", name, values, {}, loaded), []
    _check(arguments)
    return Document(_COMMAND, "", name, values, {}, loaded), list(arguments)


def _of_process(function: Callable[..., Any]) -> tuple[str, Callable[..., Any] | None]:
    """Return the name of a function, and the function if no other process can import it."""
    name = reference.of_function(function)
    reference.check(function, name, _CALL)
    if reference.is_importable(name):
        return name, None
    from raypipe.functions.code_hash import variables
    from raypipe.launch.pool import obstacle

    if reason := obstacle(function, variables(function)):
        raise ConfigError(f"{_CALL}: function = {name}: {reason}")
    return name, function


def _check(texts: Sequence[str]) -> None:
    """Reject texts that are not ``name=value``, and arguments that are given several times."""
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise ConfigError(
                f"{_COMMAND}: {text!r}: must have the form NAME=VALUE, such as C=0.1, "
                "'C=[0.1,1,10]' or seed=0..4"
            )
    names = Counter(text.partition("=")[0].removeprefix("arguments.") for text in texts)
    for name, times in names.items():
        if times > 1 and "." not in name:
            raise ConfigError(
                f"{_COMMAND}: {name} is given {times} times; write several values of an "
                f"argument in brackets: '{name}=[...]'"
            )
