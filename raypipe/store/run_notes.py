"""Note and tags of a run: what its user says of it, in a small file next to the status.

Nothing is computed from it. A command that runs does not hold it, so it may change meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from raypipe.errors import ConfigError
from raypipe.redaction import printable, without_credentials
from raypipe.store.run_directory import RunDirectory

_LONGEST_NOTE, _LONGEST_TAG = 500, 64


@dataclass(frozen=True)
class RunNotes:
    """The note of a run, one line, and its tags, each a word."""

    note: str = ""
    tags: tuple[str, ...] = ()


def checked(note: str, tags: str | Sequence[str]) -> RunNotes:
    """Return a note and tags as they are stored: on one line, without credentials.

    Raises:
        ConfigError: one is too long, or a tag is not one word.

    """
    note = _line(note)
    if len(note) > _LONGEST_NOTE:
        raise ConfigError(f"note {note!r}: must be at most {_LONGEST_NOTE} characters long")
    words = [_line(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
    for word in words:
        if word.split() != [word] or len(word) > _LONGEST_TAG:
            raise ConfigError(
                f"tag {word!r}: must be one word of at most {_LONGEST_TAG} characters, such as "
                "baseline"
            )
    return RunNotes(note, tuple(dict.fromkeys(words)))


def _line(text: str) -> str:
    return " ".join(printable(without_credentials(text)).split())


def read(run: RunDirectory) -> RunNotes:
    """Return the note and the tags of a run: none if their file is missing or damaged.

    Raises:
        OSError: it cannot be read.

    """
    with suppress(FileNotFoundError, ValueError, TypeError, LookupError, RecursionError):
        values = json.loads(run.read(run.notes))
        return checked(values["note"], values["tags"])
    return RunNotes()


def change(
    run: RunDirectory, note: str | None, tags: Sequence[str], remove: Collection[str] = ()
) -> RunNotes:
    """Replace the note of a run, unless it is None; add and remove tags; return what holds now.

    Raises:
        ConfigError: a text that is not allowed, a tag to remove that the run does not have, or a
            file that cannot be read or written.

    """
    try:
        old = read(run)
        for tag in remove:
            if tag not in old.tags:
                known = ", ".join(old.tags) or "none"
                raise ConfigError(f"{run.shown}: has no tag {tag!r} to remove (tags: {known})")
        kept = [tag for tag in old.tags if tag not in remove]
        new = checked(old.note if note is None else note, [*kept, *tags])
        if new != old:
            run.write(run.notes, json.dumps(asdict(new)).encode())
    except OSError as error:
        raise ConfigError(f"{run.shown}/notes.json: cannot be written: {error}") from error
    return new
