"""Every view of a run names the same best result, or the same tie."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe as rp
from raypipe.commands.listing import runs
from raypipe.launch.inline import InlineLauncher
from tests.command import forget, in_process, raypipe
from tests.raypipe.report.page_reader import Page
from tests.scenario import cases, play

#: returns what rows.json has, and fails where there is nothing
SCORES = """
import json
from pathlib import Path

def score(method, seed):
    value = json.loads(Path("rows.json").read_text())[method][seed]
    if value is None:
        raise RuntimeError("bad luck")
    return {"score": value}
"""
#: few numbers, so that there are ties; any number; what is none; no row
VALUES = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0]),
    st.floats(-1e150, 1e150),
    st.sampled_from([math.nan, math.inf, -math.inf, None]),
)


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(["lower", "higher"]),
    st.lists(st.lists(VALUES, min_size=1, max_size=2), min_size=1, max_size=7),
)
@pytest.mark.usefixtures("report")
def test_all_views_name_the_same_best_result(better, scores):
    seeds = max(map(len, scores))
    rows = {f"m{n}": [*of, None][:seeds] for n, of in enumerate(scores)}
    lists = (f"method=[{','.join(rows)}]", f"seed={list(range(seeds))}")
    direction = {"lower": "--minimize", "higher": "--maximize"}[better]
    with TemporaryDirectory() as folder, chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        Path("own.py").write_text(SCORES)
        Path("rows.json").write_text(json.dumps(rows))
        words = ("map", "own:score", *lists, direction, "score", "--local", "--run-dir", "r")
        ended = in_process(InlineLauncher(), *words, environment={})
        assert ended.status in (0, 1)
        forget(Path(folder))
        best = rp.open("r").best()
        end = re.findall(r"^result: (.*)$", ended.output, re.MULTILINE)
        (listed,) = runs(".")
        shown = re.findall(r"^result +calls\.score \(.* is better\): (.*)$", raypipe("show", "r"),
                           re.MULTILINE)  # fmt: skip
        both = json.loads(raypipe("compare", "r", "r", "--json"))["best"].get("calls.score", [])
        compared = [each["points"] for each in both]  # none without a metric
        page = Page(Path("r/report/index.html").read_text())
    finite = [[x for x in of if isinstance(x, float) and math.isfinite(x)] for of in scores]
    if best is None:
        assert not any(finite)
        assert (end, listed.details.result, shown, compared) == ([], "", [], [])
        return
    assert end == [best.text]
    assert listed.details.result == best.text
    assert shown[0].startswith(best.text.removeprefix("score "))
    named = [point["method"] for point in best.points if point]
    if named:
        leaders = compared[0]
        assert compared == [leaders] * 2
        assert f"({leaders}" in best.text
        assert any(text.startswith(leaders) for text in page.text)
        listed_names = re.findall(r"m\d+", leaders)
        assert listed_names == named[: len(listed_names)]
        assert len(named) == len(listed_names) or f"{len(named) - 3} more" in leaders


@pytest.mark.parametrize("case", cases(__file__, "best"), ids=lambda case: case["name"])
@pytest.mark.usefixtures("report")
def test_the_best_of_a_search(folder, case):
    play(case["commands"], here=str(folder))
