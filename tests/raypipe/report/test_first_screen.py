"""The four boxes of the first screen: three sentences at most, and no paragraph twice on a page."""

from __future__ import annotations

import html
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe as rp
from tests.raypipe.toy import raypipe


def boxes(page: str) -> dict[str, list[str]]:
    """Return the paragraphs of each box, after a check of the whole page."""
    main = re.sub(r"<svg.*?</svg>", "", page[page.index("<main>") :], flags=re.DOTALL)
    texts = _paragraphs(main)
    assert [text for text, count in Counter(texts).items() if count > 1] == []
    answers = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", main, re.DOTALL)
    found = {question: _paragraphs(answer) for question, answer in answers}
    for question, paragraphs in found.items():
        ends = re.findall(r"[.!?](?=\s+[A-Z]|$)|:$", "\n".join(paragraphs), re.MULTILINE)
        assert len(ends) <= 3, (question, paragraphs)
    return found


def _paragraphs(text: str) -> list[str]:
    found = re.findall(r"<p>(.*?)</p>", text, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", each)).strip() for each in found]


EQUAL = {"What to do next": ["The tables suggest no next step."]}
NOT_FINITE = (
    "calls.y is not finite in 2 of 3 rows: NaN at x=0; inf at x=1; calls.z is not finite in any of "
    "3 rows: NaN at x=0, x=1 and x=2."
)


def _fails(x: int) -> dict[str, float]:
    if x == 1:
        raise ValueError("no one")
    return {"y": x}


@pytest.mark.parametrize(
    ("function", "arguments", "options", "said"),
    [
        (lambda x: {"y": x}, {"x": 1}, {}, {}),
        (
            lambda x: {"y": x, "loss": 1.0},
            {"x": range(3)},
            {},
            {"What to do next": [
                "Say which number is better; stored calls are not computed again. Add to the "
                "command:"
            ]},
        ),
        (lambda x: {"y": 1.0}, {"x": range(9)}, {"maximize": "y"}, EQUAL),
        (lambda x: {"y": x}, {"x": range(4)}, {"minimize": "y"}, {}),
        (
            lambda x: {"y": [math.nan, math.inf, 1.0][x], "z": math.nan},
            {"x": range(3)},
            {"maximize": ["y", "z"]},
            {"What came out": [NOT_FINITE]},
        ),
        (lambda x: {f"y{n}": math.nan for n in range(9)}, {"x": range(3)},
         {"maximize": [f"y{n}" for n in range(9)]}, {}),
        (_fails, {"x": range(3)}, {"maximize": "y"},
         {"What to do next": ["1 call failed. Read the error, then continue:"]}),
        (lambda x, seed: {"y": x + seed % 3, "z": -x}, {"x": range(3), "seed": range(4)},
         {"maximize": ["y", "z"]}, {}),
        (lambda x, seed: {"y": 2.0}, {"x": range(3), "seed": range(3)}, {"maximize": "y"}, EQUAL),
        (
            lambda x: {"y": abs(x - 2)},
            {"x": 1},
            {"minimize": "y", "overrides": {"matrix.search": {
                "axes": {"arguments.x": [1, 2, 3, 4]}, "sampler": "random", "trials": 6,
                "metrics": [{"metric": "calls.y", "mode": "min"}]}}},
            {},
        ),
        (lambda x, k: {"y": x * k}, {"x": 1, "k": [1, 2]},
         {"minimize": "y", "overrides": {"matrix.axes": {"arguments.x": [1, 2, 3]}}}, {}),
    ],
    ids=("one", "undirected", "tie", "edge", "not finite", "many not finite", "failed", "seeds",
         "equal seeds", "search", "matrix"),
)  # fmt: skip
def test_functions(
    tmp_path: Path,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    said: Mapping[str, list[str]],
) -> None:
    run_dir = tmp_path / "r"
    try:
        rp.map(function, arguments, run_dir=run_dir, local=True, **options)
    except rp.RunFailedError:
        assert function is _fails
    found = boxes((run_dir / "report/index.html").read_text())
    assert {name: found[name] for name in said} == said


def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text(
        "import json, os\nwith open(os.environ['RAYPIPE_OUTPUT_DIR'] + '/m.jsonl', 'w') as file:\n"
        "    for step, held_out in enumerate([5, 1, 2, 3, 4, 5, 6, 7, 8]):\n"
        "        row = {'step': step, 'loss': 1.0, 'eval_loss': held_out}\n"
        "        print(json.dumps(row), file=file)\n"
    )
    Path("c.yaml").write_text(
        "experiment: raypipe.scripts\n"
        f"train: {{command: '{sys.executable} s.py', metrics: m.jsonl}}\n"
    )
    assert raypipe("run", "c.yaml", "--local", "--run-dir", "r") == 0
    found = boxes(Path("r/report/index.html").read_text())
    assert "was best at step 1 (1) and is worse at the end (8)" in found["What to do next"][0]


#: writes the rows of rows.json; its own section says more than a box has room for
FILL = """
import json
from pathlib import Path

import raypipe as rp
from raypipe.report.sections import Code, Section


def fill(context):
    for key, row in enumerate(json.loads(Path("rows.json").read_text())):
        context.ledger.put("scores", {str(key): row})


def sections(tables):
    found, certain, do = ([f"{name} {n}." for n in range(5)] for name in ("Found", "Sure", "Do"))
    return [Section("Own", [], findings=found, certainty=certain, advice=[*do, Code("go")])]


COLUMNS = (rp.Column("method", "text", "Its name."), rp.Column("corpus", "text", "Its corpus."),
           rp.Column("seed", "integer", "Its seed."),
           rp.Column("score", "real", "It.", better="higher"),
           rp.Column("cost", "real", "It.", better="lower"))
TABLE = rp.Table("scores", "a score", COLUMNS, axes=("method",), groups=("corpus",),
                 baselines=("m0",), repeats="seeds")
EXPERIMENT = rp.Experiment("fill", 1, rp.Settings, lambda _: [rp.Stage("fill", fill, reads=())],
                           tables=(TABLE,), report=OWN)
"""
NUMBERS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-9, 9), st.sampled_from(
    [math.nan, math.inf, None]))  # fmt: skip
ROW = st.fixed_dictionaries(
    {"method": st.sampled_from(["m0", "m1", "m2", "m3"]), "corpus": st.sampled_from("ab"),
     "seed": st.integers(0, 3), "score": NUMBERS, "cost": NUMBERS}
)  # fmt: skip


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """An experiment without sections, and one whose section says too much."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, own in (("fill_plain", "None"), ("fill_own", "sections")):
            Path(folder, f"{name}.py").write_text(FILL.replace("OWN", own))
        patch.syspath_prepend(folder)
        yield
        for name in ("fill_plain", "fill_own"):
            sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["fill_plain", "fill_own"]), st.lists(ROW, max_size=25))
def test_any_table_of_results(module: str, rows: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder, chdir(folder):
        Path("rows.json").write_text(json.dumps(rows))
        Path("e.yaml").write_text(f"experiment: {module}\n")
        assert raypipe("run", "e.yaml", "--local", "--run-dir", "r") == 0
        boxes(Path("r/report/index.html").read_text())
