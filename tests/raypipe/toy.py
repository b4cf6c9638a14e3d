"""The text of the smallest experiment."""

from __future__ import annotations

from tests.command import EXAMPLES

TOY = (EXAMPLES / "example_toy.py").read_text()
