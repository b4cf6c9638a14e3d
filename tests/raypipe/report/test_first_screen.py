"""The first screen: every sentence from the tables that give rise to it, three per box at most."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.report.page import asked, came_out, certainty, next_step
from raypipe.report.parts import Code, Section
from raypipe.report.results import RunResults
from tests.raypipe.report.page_reader import page_of, run_of
from tests.scenario import cases

CASES = cases(__file__, "first_screen")
OWN = Section("Own", [], certainty=("Certain.",), advice=("Do it.",))


def case_of(case: Mapping[str, Any]) -> RunResults:
    """The run of a case: its tables, how its stages ended, and the experiment's own section."""
    statuses = case.get("stages", ["succeeded"])
    stages = {
        "stage": [f"stage{place}" for place in range(len(statuses))], "status": statuses,
        "duration_s": 1.0, "started_at": pd.Timestamp("2026-03-02", tz="UTC"), "device": "cpu",
        "gpu_peak_bytes": None, "run_id": "r",
    }  # fmt: skip
    tables = {"stages": stages, **case.get("tables", {})}
    declared = [table for table in CASES["declared"] if table["name"] in tables]
    given = {**CASES["defaults"], "declared": declared, **case, "tables": tables}
    given["asked"] = [f"calls/{place}" for place in range(case.get("asked", 0))]
    return replace(run_of(given), sections=(OWN,) if case.get("own") else ())


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_the_boxes_say(case: Mapping[str, Any]) -> None:
    run = case_of(case)
    advice = [part.text if isinstance(part, Code) else str(part) for part in next_step(run)]
    out = came_out(run)
    tiles = [tile for part in out if isinstance(part, tuple) for tile in part]
    found = {
        "asked": list(asked(run)),
        "tiles": [[tile.label, tile.value, tile.note, tile.tone] for tile in tiles],
        "texts": [part for part in out if isinstance(part, str)],
        "best": [best.result for best in run.bests],
        "certain": list(certainty(run)),
        "next": advice,
        "last": advice[-1],
        "beaten": run.beaten,
    }
    assert {key: found[key] for key in case["says"]} == case["says"]
    assert "title" not in case or f" {case['title']} " in page_of(run).words


def _paragraphs(text: str) -> list[str]:
    found = re.findall(r"<p>(.*?)</p>", text, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", each)).strip() for each in found]


NUMBERS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-9, 9), st.sampled_from(
    [math.nan, math.inf, None]))  # fmt: skip
ROW = st.fixed_dictionaries(
    {"method": st.sampled_from(["m0", "m1", "m2", "m3"]), "corpus": st.sampled_from("ab"),
     "seed": st.integers(0, 3), "accuracy": NUMBERS, "cost": NUMBERS}
)  # fmt: skip


@settings(max_examples=5)
@given(st.booleans(), st.lists(ROW, max_size=25))
def test_the_first_screen_of_any_table(says_too_much: bool, rows: list[dict[str, Any]]) -> None:
    """Every box has three sentences at most, and none is twice on the page."""
    found, certain, do = ([f"{name} {n}." for n in range(5)] for name in ("Found", "Sure", "Do"))
    own = Section("Own", [], findings=found, certainty=certain, advice=[*do, Code("go")])
    names = ["method", "corpus", "seed", "accuracy", "cost"]
    run = case_of({"tables": {"scores": pd.DataFrame(rows, columns=names)}})
    run = replace(run, sections=(own,) if says_too_much else ())
    page = page_of(run).source
    main = re.sub(r"<svg.*?</svg>", "", page[page.index("<main>") :], flags=re.DOTALL)
    assert [text for text, count in Counter(_paragraphs(main)).items() if count > 1] == []
    answers = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", main, re.DOTALL)
    for question, answer in answers:
        paragraphs = "\n".join(_paragraphs(answer))
        ends = re.findall(r"[.!?](?=\s+[A-Z]|$)|:$", paragraphs, re.MULTILINE)
        assert len(ends) <= 3, (question, paragraphs)
