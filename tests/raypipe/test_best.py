"""Every view of a run names the same best result, or the same tie."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe as rp
from tests.raypipe.report.page_reader import Page
from tests.raypipe.toy import raypipe
from tests.scenario import cases, play

#: writes the rows of rows.json, and fails if one of them is to fail
SCORES = """
import json
from pathlib import Path

import raypipe as rp


class Settings(rp.Settings):
    '''No settings.'''


def fill(context):
    failed = False
    for key, (method, seed, score) in enumerate(json.loads(Path("rows.json").read_text())):
        if score == "failed":
            failed = True
            continue
        row = {"method": f"m{method}", "seed": seed, "score": score}
        context.ledger.put("scores", {str(key): row})
    if failed:
        raise RuntimeError("bad luck")


COLUMNS = (rp.Column("method", "text", "The method."), rp.Column("seed", "integer", "Its seed."),
           rp.Column("score", "real", "It.", better="DIRECTION"))
EXPERIMENT = rp.Experiment("scores", 1, Settings, lambda _: [rp.Stage("fill", fill, reads=())],
                           tables=(rp.Table("scores", "a score", COLUMNS, axes=("method",)),))
"""
#: few numbers, so that there are ties; any number; what is none; no value; no row
VALUES = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0]),
    st.floats(-1e150, 1e150),
    st.sampled_from([math.nan, math.inf, -math.inf, None, "failed"]),
)


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """An experiment for either direction."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for better in ("lower", "higher"):
            text = SCORES.replace("DIRECTION", better)
            Path(folder, f"{better}_scores.py").write_text(text)
        patch.syspath_prepend(folder)
        yield
        for better in ("lower", "higher"):
            sys.modules.pop(f"{better}_scores", None)


def printed(*arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        assert raypipe(*arguments) in (0, 1)
    return out.getvalue()


def leaders_of_both(metric: str) -> list[str]:
    """The best points of a run that is compared with itself; none without a metric."""
    best = json.loads(printed("compare", "r", "r", "--json"))["best"]
    return [each["points"] for each in best.get(metric, [])]


@pytest.mark.usefixtures("modules")
@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["lower", "higher"]),
    st.lists(st.lists(VALUES, min_size=1, max_size=2), min_size=1, max_size=7),
)
@pytest.mark.usefixtures("report")
def test_all_views_name_the_same_best_result(better, scores):
    rows = [(method, seed, score) for method, of in enumerate(scores)
            for seed, score in enumerate(of)]  # fmt: skip
    with TemporaryDirectory() as folder, chdir(folder):
        Path("rows.json").write_text(json.dumps(rows))
        Path("e.yaml").write_text(f"experiment: {better}_scores\n")
        output = printed("run", "e.yaml", "--local", "--run-dir", "r")
        best = rp.open("r").best()
        end = re.findall(r"^result: (.*)$", output, re.MULTILINE)
        (listed,) = json.loads(printed("ls", "--json", "."))
        shown = re.findall(r"^result +scores\.score \(.* is better\): (.*)$", printed("show", "r"),
                           re.MULTILINE)  # fmt: skip
        compared = leaders_of_both("scores.score")
        page = Page(Path("r/report/index.html").read_text())
    finite = [[x for x in of if isinstance(x, float) and math.isfinite(x)] for of in scores]
    if best is None:
        assert not any(finite)
        assert (end, listed["result"], shown, compared) == ([], "", [], [])
        return
    assert end == [best.text]
    assert listed["result"] == best.text
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
    if all(len(numbers) == len(of) for numbers, of in zip(finite, scores, strict=True)) and len(
        {len(of) for of in scores}
    ) == 1:  # nothing is missing: the best mean, and all that are equal to it  # fmt: skip
        means = [sum(of) / len(of) for of in finite]
        top = min(means) if better == "lower" else max(means)
        assert best.value == pytest.approx(top, rel=1e-9)
        same = [f"m{place}" for place, mean in enumerate(means) if math.isclose(mean, top)]
        assert named == (same if len(scores) > 1 else [])


@pytest.mark.usefixtures("report")
def test_nan_and_infinite_values_are_never_the_best_and_are_named(tmp_path):
    values = {0: math.nan, 1: math.nan, 2: math.inf, 3: 0.5, 4: -math.inf, 5: 0.7}

    def score(x):
        return {"acc": values[x]}

    run = rp.map(score, {"x": range(6)}, maximize="acc", run_dir=tmp_path / "r", local=True)
    best = run.best("calls.acc")
    assert best == rp.Best("calls.acc", "higher", 0.7, [{"x": 5}], 1, "acc 0.7 (x=5)")
    text = "calls.acc is not finite in 4 of 6 rows."
    assert text in Page((tmp_path / "r/report/index.html").read_text()).words
    for width in ("100", "80"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", width)
            shown = printed("show", str(tmp_path / "r"))
        lines = shown.splitlines()
        assert max(len(line) for line in lines if str(tmp_path) not in line) <= int(width)
        flat = " ".join(shown.split())
        assert "calls.acc (higher is better): 0.7 (x=5), 0.5 (x=3)" in flat
        assert text in flat
    with pytest.raises(rp.ConfigError, match=r"metric = loss: has no finite result \(those with: "):
        run.best("loss")


@pytest.mark.parametrize("case", cases(__file__, "best"), ids=lambda case: case["name"])
@pytest.mark.usefixtures("report")
def test_the_best_of_a_search(folder, case):
    play(case["commands"])
