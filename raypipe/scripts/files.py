"""Files of a script: their hashes, which are part of its identity."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_LETTERS = 32
#: bytes of a file that are searched for the names of environment variables
_MOST_SEARCHED = 2_000_000
#: names of environment variables with values
VARIABLE = re.compile(r"\bRAYPIPE_\w+")


def hashes(patterns: Iterable[str], directory: Path, key: str) -> dict[str, str]:
    """Return the hash of each file by its name, as the patterns give it.

    Args:
        patterns: names of files, or patterns, relative to the directory.
        directory: where the command runs.
        key: the configuration key of the patterns, for messages.

    Raises:
        ValueError: a file does not exist, or a pattern has none.

    """
    found: dict[str, str] = {}
    for pattern in patterns:
        names = [pattern]
        if any(sign in pattern for sign in "*?["):
            if Path(pattern).is_absolute():
                raise ValueError(f"{key}: {pattern}: must be relative to {directory}")
            paths = sorted(path for path in directory.glob(pattern) if path.is_file())
            names = [path.relative_to(directory).as_posix() for path in paths]
            names = [name for name in names if "__pycache__" not in name]
        if not names or not (directory / names[0]).is_file():
            raise ValueError(f"{key}: {pattern}: there is no such file in {directory}")
        for name in names:
            digest = hashlib.sha256((directory / name).read_bytes()).hexdigest()
            found[name] = digest[:_LETTERS]
    return found


def mentioned(variables: Iterable[str], files: Iterable[str], directory: Path) -> set[str]:
    """Return the environment variables whose name one of the files contains."""
    wanted, found = set(variables), set[str]()
    for name in files:
        with (directory / name).open("rb") as stream:
            text = stream.read(_MOST_SEARCHED).decode(errors="ignore")
        found |= wanted & set(VARIABLE.findall(text))
    return found


def check_unchanged(expected: Mapping[str, str], directory: Path) -> None:
    """Raise ValueError if a file is not the one that the identity of the training holds."""
    for name, digest in expected.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(
                f"{name}: is missing in {directory} on this node; put it on a shared file system, "
                "or submit the command with its working directory (ray job submit --working-dir)"
            )
        if hashlib.sha256(path.read_bytes()).hexdigest()[:_LETTERS] != digest:
            raise ValueError(f"{name}: has changed in {directory} since the command started")
