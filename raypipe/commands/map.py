"""``raypipe map``: call a function for every combination of its arguments."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.commands.request import Request
from raypipe.commands.run import Ended, execute
from raypipe.config.document import Document
from raypipe.errors import ConfigError

log = logging.getLogger(__name__)

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
    for text in texts:
        if "." not in text.partition("=")[0] and (hint := text_hint(text)):
            log.warning("command line: %s", hint)
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


def text_hint(text: str) -> str:
    """Return what to write instead of ``NAME=VALUE`` whose value is probably meant otherwise.

    Empty if it is not: ``none`` is a text in YAML, and so are numbers without brackets.
    """
    name, _, value = text.partition("=")
    words = [word.strip() for word in value.strip("[]").split(",")]
    if re.fullmatch(r"range\(.*\)", value.strip()):
        return f"{name}: {value} is a text here; write {name}=0..4 for the integers from 0 to 4"
    if not value.strip():
        return f"{name}: no value is Python's None; write \"{name}=''\" for an empty text"
    if any(word in ("none", "None") for word in words):
        return f"{name}: none is a text here; write null for Python's None"
    if len(words) > 1 and not value.startswith("[") and all(map(_is_number, words)):
        return f"{name}: {value} is one text; write '{name}=[{value}]' for several values"
    return ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
