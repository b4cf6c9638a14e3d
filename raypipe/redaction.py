"""Redaction of credentials from everything that is printed, logged or stored."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# a key with a slash in it that should have been written %2F is a secret nevertheless
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s\"']*:[^\s\"']*|[^/@\s\"']+)(?=@)")
#: in a query of a URI, also where an error quotes it without what stands before
_PARAMETER = re.compile(r"(?<=[?&#])([^\s\"'?&#=]+)=[^\s\"'&#]+")
# what kind of credentials are used is no secret: Arrow has ?credential_kind=anonymous
_SECRET = re.compile(
    r"(^|[_-])(password|passwd|passphrase|secrets?|token|credentials?|"
    r"(api|access|private|secret|encryption)[_-]?key)([_-](?!(kind|type)$)|$)",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"(^|[_-])sig(nature)?$", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """The text with ``***`` for users and secrets of the URIs in it, and of their queries.

    ``"s3://key:secret@bucket/runs?token=x"`` -> ``"s3://***@bucket/runs?token=***"``
    """
    return _CREDENTIALS.sub(HIDDEN, _PARAMETER.sub(_hidden_parameter, text))


def _hidden_parameter(found: re.Match[str]) -> str:
    name = found[1]
    return f"{name}={HIDDEN}" if is_secret(name) or _SIGNATURE.search(name) else found[0]


def shown_traceback() -> str:
    """The traceback of what is being handled, without credentials: ``log.exception`` shows them."""
    return without_credentials(traceback.format_exc())


class LogFormatter(logging.Formatter):
    """Lines of a log without credentials, those of a traceback too."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return without_credentials(super().format(record))


def is_secret(key: str) -> bool:
    """Whether the value of a (dotted) key is one, as its name tells: ``login.api_key``."""
    return _SECRET.search(key.rpartition(".")[2]) is not None


def without_secrets(value: Any) -> Any:
    """Plain values without credentials in texts, and with ``***`` for texts of secret keys."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and holds_text(item) else without_secrets(item)
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
