"""First sentences of the report on a study."""

from __future__ import annotations

import io
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from experiments.pabbo_lda.figures.report_figures import landscapes
from experiments.pabbo_lda.figures.report_sections import sections
from experiments.pabbo_lda.figures.verdict import details, verdicts
from experiments.pabbo_lda.study.aggregation import aggregate
from experiments.pabbo_lda.tables import TABLES
from raypipe.report.about import About, Declarations
from raypipe.report.plots import encode
from raypipe.report.sections import Answers, Part, Tiles
from raypipe.report.summary import summary_section
from raypipe.store.ledger import Row
from tests.experiments.pabbo_lda.test_aggregation import Values, history
from tests.experiments.pabbo_lda.test_landscape import fits
from tests.raypipe.report.page_reader import Page, report_files

Tables = dict[str, pd.DataFrame]
VALLEY = {2: 30.0, 5: 12.0, 8: 10.1, 11: 10.0, 16: 10.2, 30: 40.0, 60: 90.0}
FITS = fits({T: [mean - 0.2, mean + 0.2, mean, mean] for T, mean in VALLEY.items()})


def tables_of(values: Values, evaluations: list[Row], dataset: str = "corpus") -> Tables:
    rows = history(values, dataset=dataset)
    found = aggregate(rows, [{**fit, "dataset": dataset} for fit in evaluations])
    tables = {
        name: pd.DataFrame(each.values()).replace({None: np.nan}).infer_objects()
        for name, each in found.items()
    }
    return {**tables, "study_history": pd.DataFrame(rows), "evaluations": pd.DataFrame(evaluations)}


def _said(tables: Tables) -> str:
    names = tables["rankings"]["dataset"].unique()
    return " ".join(
        [*verdicts(tables), *(text for name in names for text in details(tables, name))]
    )


def studies(runs: int, **reach: int) -> Values:
    """Studies that reach the best value at an evaluation after the start, and improve before."""
    return {
        name: [
            [30.0 + run, *np.linspace(29, 20 + 0.01 * run, after), *[10.0] * (9 - after)]
            for run in range(runs)
        ]
        for name, after in reach.items()
    }


def test_an_optimizer_that_all_tests_put_first_is_named_the_winner() -> None:
    text = _said(tables_of(studies(12, bisect=3, ga=5, random=7), FITS))
    assert text.startswith(
        "bisect won: its area under curve is lower than that of every other optimizer (p ≤ 0.05 in "
        "paired tests over 12 runs, Holm's correction)."
    )
    assert "medians over 12 runs: bisect 3, ga 5, random 7." in text


def test_too_few_runs_name_no_winner_and_one_number_of_runs_is_asked_for() -> None:
    tables = tables_of(studies(3, bisect=2, ga=5, random=7), FITS)
    text = _said(tables)
    assert text.startswith("No winner: bisect has the lowest average rank by area under curve")
    assert "but no test tells bisect from another optimizer (p ≤ 0.05 in paired tests over" in text
    assert _first_screen(tables)["What to do next"] == [
        "3 runs cannot tell the optimizers apart: paired tests of all pairs take 7. Set lda.runs=7."
    ]
    assert not re.search(r"need \d|take \d", text)
    (once,) = _first_screen(tables_of(studies(1, bisect=2, random=7), FITS))["What to do next"]
    assert once == (
        "1 run cannot tell the optimizers apart: paired tests of all pairs take 6. Set lda.runs=6."
    )
    enough = tables_of(studies(12, bisect=3, ga=5, random=7), FITS)
    assert _first_screen(enough)["What to do next"] == ["The tables suggest no next step."]


def test_a_tie_of_all_optimizers_is_named_and_no_repetition_is_asked_for() -> None:
    names = ("ga", "es", "tpe", "pso", "sa", "de", "random", "bisect", "gp_ei")
    values = {name: [[30.0 + run, 20.0, 10.0 + run] for run in range(3)] for name in names}
    tables = tables_of(values, FITS)
    about = _about(tables)
    best = about.key_result
    assert best is not None
    assert best.value == 11.0
    assert best.text == "best_perplexity 11 (ga, es, tpe and 3 more, mean of 3)"
    boxes = _first_screen(tables)
    (tiles,) = (part for part in boxes["What came out"] if isinstance(part, Tiles))
    assert tiles.tiles[0].note.startswith("ga, es, tpe and 3 more; the same as ")
    assert boxes["How certain"] == [
        "Means of 3 repetitions; ± is Student's 95 % confidence interval.",
        "Of 144 paired tests of two optimizers (all measures, Holm's correction), none finds a "
        "difference.",
    ]
    assert boxes["What to do next"] == ["The tables suggest no next step."]


def _about(tables: Tables) -> About:
    """The run of a study as its page has it."""
    stages = pd.DataFrame(
        {"stage": ["lda"], "status": "succeeded", "started_at": "2026-01-01T00:00:00Z",
         "duration_s": 1.0, "run_id": "id", "device": "cpu"}
    )  # fmt: skip
    last = tables["study_history"].groupby(["dataset", "optimizer", "run"], sort=False).tail(1)
    finals = last[["dataset", "optimizer", "run"]].assign(best_perplexity=last["best_value"])
    every = {**tables, "stages": stages, "studies": finals}
    declared = Declarations("A study.", TABLES, (), frozenset({"stages"}))
    settings = "lda: {runs: 3, seed: 0}\n"
    return About(every, "study", "raypipe run s.yaml", settings, declared, sections(tables))


def _first_screen(tables: Tables) -> dict[str, list[Part]]:
    (answers,) = summary_section(_about(tables)).parts
    assert isinstance(answers, Answers)
    return {title: list(parts) for title, parts in answers.answers}


def test_a_lead_on_some_is_named_with_those_on_whom_it_may_be_chance() -> None:
    values = studies(12, bisect=3, random=7)
    values["ga"] = [
        [*study[:2], study[2] + (0.1 + run / 100) * (-1) ** run, *study[3:]]
        for run, study in enumerate(values["bisect"])
    ]
    text = _said(tables_of(values, FITS))
    assert "the lowest average rank by area under curve; the lead of bisect on random is" in text
    assert "Against random search alone, the tests find " in text
    assert " and " in text.partition("the tests find ")[2].partition(" better.")[0]


def test_an_optimizer_that_the_tests_put_below_the_first_rank_is_named() -> None:
    """In 17 of 20 runs ga is far below bisect; in three it is last, but by little."""
    others = [f"other_{place}" for place in range(8)]

    def second(name: str, run: int) -> float:
        last = 20.2 + 0.01 * run
        if name == "ga":
            return last + 0.02 if run < 3 else 15.0
        return last - 0.02 * (len(others) - others.index(name) if name in others else 9)

    values = {
        name: [[30.0, 29.0, second(name, run), *[10.0] * 3] for run in range(20)]
        for name in ("bisect", "ga", *others)
    }
    assert _said(tables_of(values, FITS)).startswith(
        "No winner: bisect has the lowest average rank by area under curve, but the tests find ga "
        "lower than bisect (p ≤ 0.05 in paired tests over 20 runs, Holm's correction)."
    )


def test_values_on_unseen_seeds_are_compared() -> None:
    tables = tables_of(studies(3, bisect=2, random=7), FITS)
    tables["summary"]["confirmed_mean"] = [10.5, 10.25]
    text = _said(tables)
    assert (
        "Their best T, on LDA seeds that no search saw, have means from 10.25 (random) to 10.5 "
        "(bisect); no pair differs by more than chance."
    ) in text


def test_the_optimum_and_its_equals_are_said() -> None:
    tables = tables_of(studies(3, bisect=2, random=7), FITS)
    text = _said(tables)
    assert "The lowest mean, 10, is at T = 11, inside the range from 2 to 60; T = 8 to 16" in text
    assert "are within the noise of it (standard deviation over LDA seeds: 0.1633)." in text
    edge = tables_of(studies(3, bisect=2, random=7), fits({2: [1.0, 1.1], 9: [3.0, 3.1]}))
    assert "at T = 2, at the end of the range from 2 to 9" in _said(edge)


def test_each_of_several_corpora_is_named_and_without_repetitions_1_percent_counts() -> None:
    one = studies(3, bisect=2, random=7)
    parts = [tables_of(one, [], dataset=name) for name in ("first", "second")]
    tables = {name: pd.concat([each[name] for each in parts]) for name in parts[0]}
    texts = verdicts(tables)
    assert texts == ["Winner by paired tests with Holm's correction: none on first and second."]
    assert _said(tables).count("No winner: bisect has the lowest average rank by") == 2
    assert _said(tables).count("until within 1 % of the best value") == 2
    assert not landscapes(tables)
    assert verdicts({}) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_studies_without_a_value_have_no_verdict_on_them(value) -> None:
    lost = tables_of({"a": [[value] * 3] * 2, "b": [[value] * 3] * 2}, [])
    assert all("won" not in text for text in verdicts(lost))


def test_the_figure_shows_the_valley_and_its_noise() -> None:
    [plot] = landscapes(tables_of(studies(3, bisect=2, random=7), FITS))
    axes = plot.figure.axes[0]
    mean = next(line for line in axes.lines if line.get_label() == "mean")
    assert dict(zip(*mean.get_data(), strict=True)) == pytest.approx(VALLEY)
    low, high = axes.get_ylim()
    assert low < 10 < 30 < high < 90  # the lower side is shown, the higher one is cut off
    assert "Higher values are cut off." in plot.caption
    assert imread(io.BytesIO(encode(plot)["png"]))[..., :3].std() > 0.01


def test_the_summary_begins_with_the_verdict_and_the_figure() -> None:
    tables = tables_of(studies(3, bisect=2, random=7), FITS)
    tables["stages"] = pd.DataFrame(
        {"stage": ["lda"], "status": "succeeded", "started_at": "2026-01-01T00:00:00Z",
         "duration_s": 1.0, "run_id": "id", "device": "cpu"}
    )  # fmt: skip
    page = Page(report_files(tables, sections(tables), "A study", {})["index.html"].decode())
    words = page.words
    assert words.index("What came out") < words.index("No winner:") < words.index("How certain")
    assert words.index("Every fit (gray)") < words.index("How certain")
