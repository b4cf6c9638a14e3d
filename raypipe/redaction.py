"""What is shown or stored of what a user gave: everything but who signs in, and with what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# a key with a slash in it that should have been written %2F is a secret nevertheless
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s\"']*:[^\s\"']*|[^/@\s\"']+)(?=@)")
_SECRET = re.compile(
    r"(^|_)(password|passwd|passphrase|secrets?|token|credentials?|"
    r"(api|access|private|secret|encryption)_?key)(_|$)",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """The text with ``***`` for users and secrets of the URIs in it.

    ``"s3://key:secret@bucket/runs"`` -> ``"s3://***@bucket/runs"``
    """
    return _CREDENTIALS.sub(HIDDEN, text)


def is_secret(key: str) -> bool:
    """Whether the value of a (dotted) key is one, as its name tells: ``login.api_key``."""
    return _SECRET.search(key.rpartition(".")[2]) is not None


def without_secrets(value: Any) -> Any:
    """Plain values without credentials in texts, and with ``***`` for texts of secret keys."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if is_secret(key) and holds_text(item) else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def holds_text(value: Any) -> bool:
    """Whether there is a text in a plain value; numbers such as a ``token`` count are no secret."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return any(holds_text(item) for item in items)
    return isinstance(value, str)


def hidden_override(override: str) -> str:
    """``dotted.key=value`` as it may be shown."""
    key, separator, _ = override.partition("=")
    if separator and any(is_secret(part) for part in key.split(".")):
        return f"{key}={HIDDEN}"
    return without_credentials(override)
