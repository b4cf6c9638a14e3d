"""Redaction of credentials from everything that is printed, logged or stored."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# a key with an unescaped slash is a secret, too
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s\"']*:[^\s\"']*|[^/@\s\"']+)(?=@)")
#: in the query of a URI, even if an error quotes the query alone
_PARAMETER = re.compile(r"(?<=[?&#])([^\s\"'?&#=]+)=[^\s\"'&#]+")
# the kind of credentials is public: Arrow has ?credential_kind=anonymous
_SECRET = re.compile(
    r"(^|[_-])(password|passwd|passphrase|secrets?|token|credentials?|"
    r"(api|access|private|secret|encryption)[_-]?key)([_-](?!(kind|type)$)|$)",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"(^|[_-])sig(nature)?$", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """Return the text with ``***`` for users and secrets in URIs and their queries.

    ``"s3://key:secret@bucket/runs?token=x"`` -> ``"s3://***@bucket/runs?token=***"``
    """
    return _CREDENTIALS.sub(HIDDEN, _PARAMETER.sub(_hidden_parameter, text))


def _hidden_parameter(found: re.Match[str]) -> str:
    name = found[1]
    return f"{name}={HIDDEN}" if is_secret(name) or _SIGNATURE.search(name) else found[0]


def shown_traceback() -> str:
    """Return the traceback of the current exception without credentials."""
    return without_credentials(traceback.format_exc())


class LogFormatter(logging.Formatter):
    """Log formatter that redacts credentials, in tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return without_credentials(super().format(record))


def is_secret(key: str) -> bool:
    """Whether a (dotted) key's name says that its value is secret: ``login.api_key``."""
    return _SECRET.search(key.rpartition(".")[2]) is not None


def without_secrets(value: Any) -> Any:
    """Return plain values without credentials, and ``***`` for texts of secret keys."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and holds_text(item) else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def holds_text(value: Any) -> bool:
    """Whether a plain value contains text; numbers, such as a ``token`` count, are not secret."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return any(holds_text(item) for item in items)
    return isinstance(value, str)
