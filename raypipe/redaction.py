"""Redaction of what is printed, logged or stored: credentials and control characters.

As a program it copies its standard input to its standard output without credentials. It imports
nothing of raypipe, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import os
import re
import select
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

HIDDEN = "***"
#: a word from its first ``://`` on; a key with an unescaped slash is a secret, too
_ADDRESS = re.compile(r"://([^\s\"':]*:[^\s\"']*(?=@)|[^/@\s\"']+(?=@))?([^\s\"']*)")
#: in the query of a URI, even if an error quotes the query alone
#: (``;`` ends a value, as ``&`` does; within one it is written ``%3B``)
_PARAMETER = re.compile(r"(?<=[?&#;])([^\s\"'?&#=;]+)=[^\s\"'&#;]+")
# the kind of credentials is public: Arrow has ?credential_kind=anonymous; who knows the URL of a
# webhook may use it, so the setting notify is secret
_SECRET = re.compile(
    r"(^|[_-])(password|passwd|passphrase|secrets?|token|credentials?|"
    r"(api|access|private|secret|encryption)[_-]?key)([_-](?!(kind|type)$)|$)|^notify$",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"(^|[_-])sig(nature)?$", re.IGNORECASE)
#: a name, and the text that source code gives it; in files other than Python's also without quotes
_QUOTED = r"""\"{3}.*?\"{3}|'{3}.*?'{3}|"[^"\n]+"|'[^'\n]+'"""
_GIVEN = r"""(?<![\w-])([\w-]{1,64})(["']?\]?\s*(?::\s*[\w.| ]{1,64})?[:=]\s*[rbuf]{0,2})"""
_IN_CODE = re.compile(f"{_GIVEN}({_QUOTED})", re.DOTALL)
_IN_TEXT = re.compile(rf"{_GIVEN}({_QUOTED}|[^\s\"'#]+)", re.DOTALL)
#: the text up to the last end of a word, as a credential is within one; bytes of a word
_LAST_END, _LONGEST_WORD = re.compile(rb".*[\s\"']", re.DOTALL), 65536
#: colors, titles and other sequences that act on a terminal (ECMA-48)
_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~]?)"
)


def without_credentials(text: str) -> str:
    """Return the text with ``***`` for users and secrets in URIs and their queries.

    ``"s3://key:secret@bucket/runs?token=x"`` -> ``"s3://***@bucket/runs?token=***"``
    """
    return _ADDRESS.sub(_hidden_user, _PARAMETER.sub(_hidden_parameter, text))


def _hidden_user(found: re.Match[str]) -> str:
    return f"://{HIDDEN if found[1] else ''}{found[2]}"


def _hidden_parameter(found: re.Match[str]) -> str:
    name = found[1]
    return f"{name}={HIDDEN}" if is_secret(name) or _SIGNATURE.search(name) else found[0]


def shown_traceback() -> str:
    """Return the traceback of the current exception without credentials."""
    return without_credentials(traceback.format_exc())


def redacted(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a stream of bytes without credentials; a word is passed on once it is complete.

    Everything is passed on at an empty chunk and at the end. A word of more than 64 KiB is cut.
    """
    rest = b""
    for chunk in chain(chunks, [b""]):
        text = rest + chunk
        found = _LAST_END.match(text)
        end = found.end() if found is not None else 0
        if not chunk or len(text) - end > _LONGEST_WORD:
            end = len(text)
        rest = text[end:]
        shown = without_credentials(text[:end].decode(errors="surrogateescape"))
        yield shown.encode(errors="surrogateescape")


def printable(text: str, keep: str = "") -> str:
    """Return a text that does not act on the terminal of a reader.

    Control sequences, such as colors, are removed. Other control characters become spaces, except
    for those to ``keep``.
    """
    plain = _SEQUENCE.sub("", encodable(text))
    return "".join(c if c.isprintable() or c in keep else " " for c in plain)


def encodable(text: str) -> str:
    r"""Return a text that UTF-8 can encode: a lone surrogate becomes ``\udcff``.

    Python has them in the names of files that are not UTF-8.
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def last_state(line: str) -> str:
    """Return what a terminal shows of a line that a progress bar has written over."""
    return line.rstrip("\r").rpartition("\r")[2]


def is_secret(key: str) -> bool:
    """Whether a (dotted) key's name says that its value is secret: ``login.api_key``."""
    return _SECRET.search(key.rpartition(".")[2]) is not None


def without_secrets(value: Any) -> Any:
    """Return plain values without credentials, and ``***`` for texts of secret keys."""
    if isinstance(value, int | float):  # most values of the rows of many calls
        return value
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if holds_text(item) and is_secret(str(key)) else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def source_without_secrets(text: str, *, python: bool = True) -> str:
    """Return source code without credentials in URIs, and ``***`` for texts of secret names."""

    def hidden(found: re.Match[str]) -> str:
        return f'{found[1]}{found[2]}"{HIDDEN}"' if is_secret(found[1]) else found[0]

    return (_IN_CODE if python else _IN_TEXT).sub(hidden, without_credentials(text))


def holds_text(value: Any) -> bool:
    """Whether a plain value contains text; numbers, such as a ``token`` count, are not secret."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return any(holds_text(item) for item in items)
    return isinstance(value, str)


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Refuse secrets among values that name results, and so are stored and shown as they are.

    Raises:
        ValueError: a value has the name of a secret, or holds credentials.

    """
    for name, value in values.items():
        if without_secrets({name: value}) != {name: value}:
            variable = name.rpartition(".")[2].upper()
            raise ValueError(
                f"{name}: holds a secret, and it would be stored with the results and shown; pass "
                f"secrets in the environment, and read os.environ[{variable!r}] in your code"
            )


def main(control: int) -> None:
    """Copy the standard input without credentials, until all its writers have ended.

    When the other side of the socket ``control`` is closed for writing, everything that was written
    before is passed on, and the socket is closed: a writer may outlive the job that started it.
    """
    for text in redacted(_chunks(control)):
        with suppress(OSError):  # the disk is full, which the ledger reports
            os.write(1, text)


def _chunks(control: int) -> Iterator[bytes]:
    """Yield the standard input; an empty chunk before the socket is closed."""
    poll = select.poll()
    for descriptor in (0, control):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if 0 not in ready:
            yield b""
            poll.unregister(control)
            os.close(control)
        elif chunk := os.read(0, _LONGEST_WORD):
            yield chunk
        else:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
