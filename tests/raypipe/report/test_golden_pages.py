"""Pages of stored runs as a reader has them: every text, and every value at the pointer.

After a wanted change: ``python -m tests.raypipe.report.test_golden_pages``, then read the
difference.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.report.parts import Plot
from raypipe.report.plots import style
from raypipe.report.results import RunResults
from raypipe.report.sections import sweep_section
from tests.raypipe.report.page_reader import page_of, run_of

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


def stored_run(name: str) -> RunResults:
    """Return a run that is stored here."""
    stored = json.loads((FOLDER / f"{name}.json").read_text())
    stored["tables"] = {name: _table(rows) for name, rows in stored["tables"].items()}
    return run_of(stored, name)


def _table(rows: object) -> pd.DataFrame:
    frame = pd.read_json(io.StringIO(json.dumps(rows)), orient="split", dtype=False)
    for column in {"at", "started_at"} & {*frame}:
        frame[column] = pd.to_datetime(frame[column], utc=True, format="ISO8601")
    return frame


def text_of(name: str) -> str:
    """The page of a stored run, a line for each text of it; drawings by what they say alone."""
    page = page_of(stored_run(name)).source
    main = page[page.index("<main>") : page.index("</main>")]
    main = re.sub(r"<text.*?</text>|<!--.*?-->", "", main, flags=re.DOTALL)
    main = re.sub(r"</t[hd]><t[hd]", " | <td", main)
    texts = re.sub(r"</?(span|code|b)\b[^>]*>", "", main)
    lines = (line.strip() for line in re.sub(r"<[^>]*>", "\n", texts).splitlines())
    return "\n".join(filter(None, lines)) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_run_has_this_page(name: str) -> None:
    assert text_of(name) == (FOLDER / f"{name}.txt").read_text()


#: tables that a training or an experiment writes
WRITTEN = [(name, table) for name in NAMES
           for table in ("trials", "calls", "measures", "steps", "squares")
           if table in json.loads((FOLDER / f"{name}.json").read_text())["tables"]]  # fmt: skip


@settings(max_examples=3)
@given(st.sampled_from(WRITTEN), st.data())
def test_no_table_with_gaps_stops_the_report(written: tuple[str, str], data: st.DataObject) -> None:
    run, table = stored_run(written[0]), written[1]
    rows = run.tables[table].copy()
    for column in rows.columns.difference(["trial_id", "stage", "status", "variant", "step"]):
        gaps = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=len(rows)))
        rows[column] = rows[column].astype(object)
        rows.loc[gaps, column] = None
    page_of(replace(run, tables={**run.tables, table: rows}))


def test_learning_curves_show_every_trial_where_it_ended() -> None:
    run = stored_run("quality")
    with style():
        plots = [part for part in sweep_section(run).parts if isinstance(part, Plot)]
    (plot,) = (plot for plot in plots if plot.name == "eval_loss-sweep of train_medium")
    (axes,) = plot.figure.axes
    curves = [line for line in axes.lines if str(line.get_label())[:1] != "_"]
    assert [max(line.get_xdata()) for line in curves].count(300) == 4
    low, high = axes.get_ylim()
    assert low < run.tables["steps"]["eval_loss"].min() < high


if __name__ == "__main__":
    for each in NAMES:
        (FOLDER / f"{each}.txt").write_text(text_of(each))
