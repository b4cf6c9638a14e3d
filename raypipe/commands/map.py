"""``raypipe map``: call a function for every combination of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.commands.request import Request
from raypipe.commands.run import Ended, execute
from raypipe.config.document import Document
from raypipe.errors import ConfigError

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
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise ConfigError(
                f"command line: {text!r}: must have the form NAME=VALUE, such as C=0.1, "
                "'C=[0.1,1,10]' or seed=0..4"
            )
    for key, times in Counter(map(_argument, texts)).items():
        if times > 1 and "." not in key:
            raise ConfigError(
                f"command line: {key} is given {times} times; write several values of an "
                f"argument in brackets: '{key}=[...]'"
            )
    given = {key: value for key, value in settings.items() if value is not None and value != []}
    options = [word for key, value in given.items() for word in _option(key, value)]
    document = Document(ORIGIN, "", name, given, {})
    request = Request("map", name, texts, document=document, options=options, **more)
    return execute(request)


def _argument(text: str) -> str:
    return text.partition("=")[0].removeprefix("arguments.")


def _option(key: str, value: Any) -> list[str]:
    """Return the words of an option; one that may be repeated is given once per value."""
    name = f"--{key.removesuffix('_s').replace('_', '-')}"
    unit = "s" if key.endswith("_s") else ""
    values = value if isinstance(value, list) else [value]
    texts = (f"{each:g}" if isinstance(each, float) else str(each) for each in values)
    return [word for text in texts for word in (name, f"{text}{unit}")]
