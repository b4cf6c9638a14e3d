"""``raypipe map``: call a function for every combination of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raypipe.commands.configuration import settings_model
from raypipe.commands.request import Request
from raypipe.commands.run import Ended, execute
from raypipe.config.document import Document
from raypipe.errors import ConfigError
from raypipe.functions import reference
from raypipe.functions.arguments import keywords
from raypipe.functions.experiment import function_experiment

#: the name of the command line in messages
ORIGIN = "command line"


def map_function(
    name: str, texts: Sequence[str], settings: Mapping[str, Any], **more: Any
) -> Ended:
    """Call a function as tasks.

    Args:
        name: ``module:function``.
        texts: ``name=value`` for arguments of the function, ``dotted.key=value`` for settings.
        settings: options by the key of the configuration that each stands for; None if not given.
        more: further arguments of the request.

    Raises:
        ConfigError: a mistake; nothing was started.

    """
    function = reference.load(name, ORIGIN)
    given = {key: value for key, value in settings.items() if value is not None and value != []}
    options = [word for key, value in given.items() for word in _option(key, value)]
    document = Document(ORIGIN, "", name, given, {})
    overrides = [_override(text, name, function) for text in texts]
    request = Request("map", name, overrides, document=document, options=options, **more)
    return execute(request)


def _option(key: str, value: Any) -> list[str]:
    """Return the words of an option; one that may be repeated is given once per value."""
    name = f"--{key.removesuffix('_s').replace('_', '-')}"
    unit = "s" if key.endswith("_s") else ""
    values = value if isinstance(value, list) else [value]
    texts = (f"{each:g}" if isinstance(each, float) else str(each) for each in values)
    return [word for text in texts for word in (name, f"{text}{unit}")]


def _override(text: str, name: str, function: Callable[..., Any]) -> str:
    """Return the override of an argument or of a setting. Raises ConfigError."""
    key, separator, _ = text.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"command line: {text!r}: must have the form NAME=VALUE, such as C=0.1, "
            "'C=[0.1,1,10]' or seed=0..4"
        )
    first = key.partition(".")[0]
    settings = settings_model(function_experiment(name, function)).model_fields
    if first in settings and first not in (keywords(function) or ()):
        return text
    return f"arguments.{text}"
