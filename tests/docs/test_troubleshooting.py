"""The messages that the troubleshooting page quotes are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import DOCS, PROJECT

_HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)
MESSAGES = _HEADING.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
_VALUE = "\0"  # a value that a message inserts


def _texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a module; an f-string is one text with its values left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else _VALUE for v in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def texts() -> list[str]:
    sources = (PROJECT / "raypipe").rglob("*.py")
    return [text for file in sources for text in _texts(ast.parse(file.read_text("utf-8")))]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_source(message: str, texts: list[str]) -> None:
    pattern = re.compile(r"[\s\S]*".join(map(re.escape, message.split("..."))))
    assert any(pattern.search(text) for text in texts)


def test_the_page_quotes_messages() -> None:
    assert len(MESSAGES) > 25
