"""Text files with fields per line, read with the places that errors name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.files import open_text, reading


class Row(NamedTuple):
    """Two fields of a line, and their place in the file."""

    place: str
    left: str
    right: str


def numbered_lines(path: Path, form: str) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the content of each non-blank line of a UTF-8 text file.

    Raises:
        CorpusError: the file does not exist, is corrupt or is not UTF-8.

    """
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; expected lines {form}")
    with reading(path, f"UTF-8 text, lines {form}"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.removesuffix("\n")


def tab_rows(path: Path, form: str) -> Iterator[Row]:
    """Yield the lines ``left<TAB>right`` of a file, their fields stripped of white space.

    Raises:
        CorpusError: as :func:`numbered_lines`, or a line has another number of fields.

    """
    for number, line in numbered_lines(path, form):
        fields = line.split("\t")
        if len(fields) != 2:
            raise malformed(path, number, line, form)
        yield Row(f"{path}, line {number}", fields[0].strip(), fields[1].strip())


def malformed(path: Path, number: int, line: str, form: str) -> CorpusError:
    """Return the error for a line in another format."""
    shown = textwrap.shorten(line, 80, placeholder=" ...")
    return CorpusError(f"{path}, line {number}: expected {form}, got {shown!r}; correct that line")
