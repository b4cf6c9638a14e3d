"""The docs say what the code does: generated parts, and the files that questions lead to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import generate
from raypipe.commands.configuration import settings_model
from raypipe.config.levels import keys_of
from raypipe.graph.configuration import load_experiment

PROJECT = Path(__file__).resolve().parents[1]


PAGES = ("results.md", "configuration.md", "reference/commands.md", "reference/api.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_generated_parts_are_up_to_date(page: str) -> None:
    written = (PROJECT / "docs" / page).read_text(encoding="utf-8")
    assert written == generate.pages()[page], "run `make docs`"


def test_every_question_of_the_architecture_leads_to_a_file() -> None:
    text = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| Where [^|]*\? \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(answers) >= 20
    assert [answer for answer in answers if not (PROJECT / answer).exists()] == []


@pytest.mark.parametrize("name", generate.EXPERIMENTS)
def test_every_key_has_a_sentence(name: str) -> None:
    keys = keys_of(settings_model(load_experiment(f"experiments.{name}", "test")))
    assert len(keys) > 50
    without = [k.name for k in keys if len(k.meaning) < 15 or not k.meaning.endswith(".")]
    assert without == []
