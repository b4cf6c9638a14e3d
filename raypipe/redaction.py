"""What is shown or stored of an address: everything but who signs in there, and with what."""

from __future__ import annotations

import re

# a key with a slash in it that should have been written %2F is a secret nevertheless
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s\"']*:[^\s\"']*|[^/@\s\"']+)(?=@)")


def without_credentials(text: str) -> str:
    """The text with ``***`` for users and secrets of the URIs in it.

    ``"s3://key:secret@bucket/runs"`` -> ``"s3://***@bucket/runs"``
    """
    return _CREDENTIALS.sub("***", text)
