"""Code blocks of the documentation's pages, and how they run.

- A block with a file name (``title="digits.py"``, or a paragraph before it that begins with the
  name in backticks) is a file.
- A ``bash`` block holds commands; a comment ``# exit status 2`` behind one says how it ends.
- A ``python`` block without a file name is a script.
- A ``text`` block titled ``Output`` is part of what the block before it prints; ``...`` stands for
  anything.
- A block that begins with the comment ``# needs ...`` cannot run on every machine. It is checked,
  but does not run.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from raypipe.commands import cluster
from raypipe.launch.inline import InlineLauncher
from tests.command import forget, in_process, spawn

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<options>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_NAMED_BEFORE = re.compile(r"(?:^|\n\n)`(?P<name>[\w/.-]+\.\w+)`[^\n]*:\n\n\Z")
_STATUS = re.compile(r"#\s*exit status (\d+)\s*$")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def needs(self) -> str:
        """The requirement that keeps the block from running everywhere; empty if there is none."""
        found = re.match(r"# needs ([^\n]+)", self.text)
        return found[1] if found else ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(PROJECT)}:{self.line}"

    @property
    def is_output(self) -> bool:
        return self.language == "text" and self.title == "Output"

    @property
    def is_file(self) -> bool:
        return bool(self.title) and not self.is_output


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        named = _NAMED_BEFORE.search(text[: match.start()])
        name = title[1] if title else named["name"] if named else ""
        line = text.count("\n", 0, match.start()) + 1
        indent = re.compile(f"^{match['indent']}", re.MULTILINE)
        content = indent.sub("", match["text"])
        found.append(Block(page, line, match["language"], name, content))
    return found


def files_before(page: Path) -> list[Block]:
    """The files of the page that this one continues, if its text says so."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r"continues with the files.*?\]\((?P<page>[^)#]+)\)", text, re.DOTALL)
    if found is None:
        return []
    return [block for block in blocks(page.parent / found["page"]) if block.is_file]


def commands(text: str) -> Iterator[tuple[dict[str, str], list[str], int]]:
    """The commands of a bash block, one a line: variables, words and exit status."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        environment = {}
        if words[0] == "export":
            words = words[1:]
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        status = _STATUS.search(line)
        yield environment, words, int(status[1]) if status else 0


class Reader:
    """A reader in a folder who runs the blocks of a page in their order, without Ray."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._environment: dict[str, str] = {}

    def follow(self, block: Block) -> None:
        """Write the file, run the commands, or compare the output."""
        if block.needs:
            return
        if block.is_file:
            target = self.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block.is_output:
            differences(block, self.printed)
        elif block.language == "python":
            self.printed = self._script(block)
        elif block.language == "bash":
            self.printed = "".join(self._run(block, *command) for command in commands(block.text))
        else:
            assert block.language in ("text", "yaml"), f"{block.place}: cannot run"

    def _script(self, block: Block) -> str:
        with visiting(self.folder), redirect_stdout(io.StringIO()) as output:
            code = compile(block.text, block.place, "exec", dont_inherit=True)
            exec(code, self._names)
        return output.getvalue()

    def _run(self, block: Block, own: dict[str, str], words: list[str], expected: int) -> str:
        if not words:  # export NAME=VALUE
            self._environment |= own
            return ""
        environment = {**self._environment, **own}
        if words[0] == "raypipe":
            with visiting(self.folder):
                ended = in_process(InlineLauncher(), *words[1:], environment=environment)
            status, output = ended.status, ended.output
        else:
            assert words[0] in ("ls", "cat", "rm", "mkdir", "python"), (
                f"{block.place}: {words[0]!r} does not run in tests; "
                "begin the block with the comment `# needs ...`"
            )
            python = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
            process = spawn(self.folder, *words, environment={**environment, **python})
            output, _ = process.communicate()
            status = process.returncode
        assert status == expected, f"{block.place}: {words}:\n{output}"
        return output


@contextmanager
def visiting(folder: Path) -> Iterator[None]:
    """Work in a folder whose modules are imported afresh, on a launcher without Ray."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(sys.stdout):
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second is seen
        patch.setattr(cluster, "start", lambda *_: InlineLauncher())
        try:
            yield
        finally:
            forget(folder)


def differences(expected: Block, printed: str) -> None:
    """Raise AssertionError unless the expected lines occur in the output, in their order."""
    rest = [_plain(line) for line in printed.splitlines() if line.strip()]
    for line in expected.text.splitlines():
        if not line.strip() or line.strip() == "...":
            continue
        pattern = re.compile(".*".join(map(re.escape, _plain(line).split("..."))))
        found = next((i for i, other in enumerate(rest) if pattern.fullmatch(other)), None)
        assert found is not None, f"{expected.place}: not printed: {line!r}\n{printed}"
        rest = rest[found + 1 :]


def _plain(line: str) -> str:
    return " ".join(line.split())
