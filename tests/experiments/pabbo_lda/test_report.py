"""The report on studies: figures, sections, and the sentences of the first screen."""

from __future__ import annotations

import io
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from matplotlib.lines import Line2D
from numpy.testing import assert_allclose

from experiments.pabbo_lda.figures import NAMES, figures
from experiments.pabbo_lda.report_sections import sections, verdicts
from experiments.pabbo_lda.study.comparison import aggregate
from experiments.pabbo_lda.tables import TABLES
from raypipe.graph.tables import STAGES
from raypipe.report.page import summary_section
from raypipe.report.parts import Answers, Part, Tiles
from raypipe.report.plots import Plot, encode
from raypipe.report.results import Declarations, RunResults
from raypipe.store.ledger import Row
from tests.experiments.pabbo_lda.test_comparison import Values, fits, history
from tests.raypipe.report.page_reader import HOSTILE, Page, page_of

Tables = dict[str, pd.DataFrame]
START = [733, 133, 355, 115]
KINDS = ["best_by_evaluation", "best_by_time", "final_bars", "final_boxes"]
VALLEY = {2: 30.0, 5: 12.0, 8: 10.1, 11: 10.0, 16: 10.2, 30: 40.0, 60: 90.0}
FITS = fits({T: [mean - 0.2, mean + 0.2, mean, mean] for T, mean in VALLEY.items()})


def drawn_tables(datasets: list[str], optimizers: list[str], runs: int, length: int = 12) -> Tables:
    """Studies on a made-up objective, one evaluation after the other, with a shared start."""
    rows = []
    for d, dataset in enumerate(datasets):
        for o, optimizer in enumerate(optimizers):
            for run in range(runs):
                rng = np.random.default_rng([d, o, run])
                T = [*START, *rng.choice(np.arange(2, 100), length - len(START), replace=False)]
                study = {"dataset": dataset, "optimizer": optimizer, "run": run, "T": T}
                rows.append(pd.DataFrame(study))
    table = pd.concat(rows, ignore_index=True)
    table["value"] = 1500 + np.log(table["T"] / 10) ** 4 * 40 + 7 * table["run"]
    table["cpu_s"] = 5 + 0.1 * table["T"]
    keys = ["dataset", "optimizer", "run"]
    each = table.groupby(keys)
    table["evaluation"] = each.cumcount() + 1
    table["batch"] = (table["evaluation"] - len(START)).clip(lower=0)
    table["best_value"], table["cpu_s"] = each["value"].cummin(), each["cpu_s"].cumsum()
    last = table.groupby(keys, sort=False).last().reset_index()
    studies = last.rename(columns={"best_value": "best_perplexity"})
    groups = studies.groupby(["dataset", "optimizer"], sort=False)["best_perplexity"]
    summary = groups.agg(["count", "mean", "std", "min", "max", "median"]).reset_index()
    summary = summary.rename(columns={"count": "runs"})
    return {"study_history": table, "studies": studies, "summary": summary}


def named(tables: Tables) -> dict[str, Plot]:
    return {figure.name: figure for figure in figures(tables)}


def by_run(table: pd.DataFrame) -> pd.DataFrame:
    return table.pivot(index="evaluation", columns="run", values="best_value")


def line_of(axes: Axes, label: str) -> Line2D:
    return next(line for line in axes.lines if line.get_label() == label)


def at(line: Line2D, x: np.ndarray) -> np.ndarray:
    """A step curve's value at each x."""
    known = np.asarray(line.get_xdata(), float)
    assert line.get_drawstyle() == "steps-post"
    return np.asarray(line.get_ydata(), float)[np.searchsorted(known, x, side="right") - 1]


@pytest.mark.parametrize(("datasets", "optimizers", "runs"), [(1, 2, 1), (4, 8, 3)])
def test_every_corpus_gets_every_kind_of_figure(datasets, optimizers, runs):
    names = [f"corpus{i}" for i in range(datasets)]
    drawn = figures(drawn_tables(names, list(NAMES)[:optimizers], runs))
    assert [figure.name for figure in drawn] == [f"{k}-{name}" for k in KINDS for name in names]
    for figure in drawn[:: datasets + 1]:
        files = encode(figure)
        assert imread(io.BytesIO(files["png"]))[..., :3].std() > 0.01
        assert len(files["svg"]) > 5000


def test_curves_are_medians_with_quartiles_and_carry_the_best_of_an_ended_study():
    tables = drawn_tables(["corpus"], ["ga", "golden_section"], 5)
    table = tables["study_history"]
    short = (table["optimizer"] == "golden_section") & (table["evaluation"] > 8)
    tables["study_history"] = table[~short]
    plot = named(tables)["best_by_evaluation-corpus"]
    axes = plot.figure.axes[0]
    best = by_run(table[table["optimizer"] == "golden_section"])
    best.loc[9:] = best.loc[8].to_numpy()
    curve = line_of(axes, "golden_section")
    assert_allclose(at(curve, np.arange(1, 13)), best.median(axis=1))
    assert curve.get_xdata()[-1] == 12
    corners = axes.collections[1].get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(best.quantile(0.25, axis=1).min())
    assert corners[:, 1].max() == pytest.approx(best.quantile(0.75, axis=1).max())
    assert "carries its best forward" in plot.caption
    span = next(patch for patch in axes.patches if patch.get_label() == "_start")
    assert span.get_x() + span.get_width() == len(START)
    other = (table["optimizer"] == "ga") & (table["evaluation"] == 1)
    tables["study_history"] = table.assign(T=table["T"].mask(other, 500))
    axes = named(tables)["best_by_evaluation-corpus"].figure.axes[0]
    assert not axes.patches, "a start that is not shared is not shaded"


def test_bars_show_mean_and_deviation_from_zero_also_below_it():
    tables = drawn_tables(["corpus"], ["ga", "es", "random"], 4)
    axes = named(tables)["final_bars-corpus"].figure.axes[0]
    assert axes.get_xlim()[0] == 0
    summary = tables["summary"].sort_values("mean", ascending=False)
    assert_allclose([bar.get_width() for bar in axes.patches], summary["mean"])
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [NAMES[name] for name in summary["optimizer"]]
    segments = np.array(axes.collections[0].get_segments())[:, :, 0]
    assert_allclose(segments[:, 1] - segments[:, 0], 2 * summary["std"])
    tables["summary"][["mean", "std"]] = [[-0.25, 0.01], [-0.2, 0.01], [-0.1, 0.01]]
    low, high = named(tables)["final_bars-corpus"].figure.axes[0].get_xlim()
    assert low <= -0.26
    assert high == 0


def test_boxes_hold_every_finite_run_best_median_first():
    tables = drawn_tables(["corpus"], ["ga", "es"], 5)
    studies = tables["studies"]
    studies.loc[(studies["optimizer"] == "ga") & (studies["run"] == 0), "best_perplexity"] = np.inf
    plot = named(tables)["final_boxes-corpus"]
    groups = studies[np.isfinite(studies["best_perplexity"])].groupby("optimizer")
    expected = {name: sorted(group["best_perplexity"]) for name, group in groups}
    shown = {
        points.get_label(): sorted(np.asarray(points.get_offsets())[:, 1])
        for points in plot.figure.axes[0].collections
    }
    assert shown == {name: pytest.approx(values) for name, values in expected.items()}
    assert list(shown) == sorted(expected, key=lambda name: np.median(expected[name]))
    assert "1 run without a finite value" in plot.caption


def test_values_that_are_infinite_missing_or_huge_are_survived():
    table = drawn_tables(["corpus", "broken"], ["ga", "unknown_one"], 3)["study_history"]
    early = table["evaluation"] <= 2
    table["best_value"] = table["best_value"].mask(early, np.inf).mask(table["run"] == 1)
    table.loc[table["optimizer"] == "ga", "best_value"] *= 1e40
    table.loc[table["dataset"] == "broken", "best_value"] = np.nan
    drawn = named({"study_history": table})
    assert list(drawn) == ["best_by_evaluation-corpus", "best_by_time-corpus"]
    axes = drawn["best_by_evaluation-corpus"].figure.axes[0]
    assert axes.get_yscale() == "log"
    shown = table[(table["dataset"] == "corpus") & (table["optimizer"] == "unknown_one")]
    expected = by_run(shown[shown["run"] != 1]).median(axis=1)[2:]
    assert_allclose(at(line_of(axes, "unknown_one"), np.arange(3, 13)), expected)


def small_tables(text: str = "20news") -> Tables:
    return {
        "summary": pd.DataFrame(
            {"dataset": text, "optimizer": ["ga", text], "runs": 10, "mean": [1776.35, 1679.96],
             "std": [185.94, 25.09], "min": [1600.0, 1640.0], "max": [2000.0, 1700.0],
             "median": [1750.0, 1680.0], "duration_s_mean": 125.0}
        ),
        "rankings": pd.DataFrame(
            {"dataset": text, "measure": "final_value", "optimizer": ["ga", text],
             "average_rank": [1.7, 1.3], "chi2": 9.6, "p_value": 0.0019, "kendalls_w": 0.96,
             "conclusion": "they differ"}
        ),
        "comparisons": pd.DataFrame(
            {"dataset": text, "measure": "final_value", "first": ["ga", "ga", "es"],
             "second": ["sabbo", text, text], "n": 10, "equal": 0, "p_value": [0.001, 0.4, 0.5],
             "p_holm": [0.003, 0.8, 0.8], "effect_size": [1.0, 0.1, 0.1],
             "conclusion": ["sabbo is lower", "no difference found", "no difference found"]}
        ),
    }  # fmt: skip


def _page(tables: Tables) -> Page:
    return page_of(RunResults(tables, "A study", sections=sections(tables)))


def test_sections_follow_from_the_tables():
    tables = small_tables()
    assert _page(tables).headings == ["results", "figures", "statistics"]
    assert _page({}).headings == []
    assert _page({name: table.iloc[:0] for name, table in tables.items()}).headings == []
    for name in tables:
        assert _page({key: table for key, table in tables.items() if key != name}).headings
    hostile = _page(small_tables(HOSTILE))
    assert hostile.only_own_script
    assert HOSTILE in hostile.words


def test_values_and_conclusions_are_written_for_readers():
    words = _page(small_tables()).words
    for text in (
        *("1776 ± 186", "1680 ± 25", "2 min 05 s", "final value", "sabbo is lower (against ga)"),
        "They differ. Friedman χ² = 9.6, p = 0.0019, Kendall's W = 0.96.",
        *("no difference found (2 pairs)", "average rank 20news 1.3 ga 1.7"),
    ):
        assert text in words


def test_the_lowest_mean_stands_out_and_names_no_winner_that_no_test_finds():
    tables = small_tables()
    [lowest] = re.findall(r'<tr class="first"><th scope="row">([^<]*)', _page(tables).source)
    assert lowest == "20news"
    words = _page(tables).words
    assert "Lowest mean: 1680 ± 25 by 20news, 10 runs." in words
    assert "This names no winner: no paired test tells it from es, ga and sabbo." in words
    decided = {**tables, "comparisons": tables["comparisons"].assign(p_holm=0.01)}
    assert "no paired test tells it from sabbo." in _page(decided).words  # two are higher
    tables["summary"]["mean"] = [np.inf, np.nan]
    page = _page(tables)
    assert "no finite value" in page.words
    assert not [row for row in page.all("tr") if row.get("class") == "first"]


def tables_of(values: Values, evaluations: list[Row], dataset: str = "corpus") -> Tables:
    rows = history(values, dataset=dataset)
    found = aggregate(rows, [{**fit, "dataset": dataset} for fit in evaluations])
    tables = {
        name: pd.DataFrame(each.values()).replace({None: np.nan}).infer_objects()
        for name, each in found.items()
    }
    return {**tables, "study_history": pd.DataFrame(rows), "evaluations": pd.DataFrame(evaluations)}


def studies(runs: int, **reach: int) -> Values:
    """Studies that reach the best value at an evaluation after the start, and improve before."""
    return {
        name: [
            [30.0 + run, *np.linspace(29, 20 + 0.01 * run, after), *[10.0] * (9 - after)]
            for run in range(runs)
        ]
        for name, after in reach.items()
    }


def first_screen(tables: Tables) -> tuple[RunResults, dict[str, list[Part]]]:
    """The run of a study as its page has it, and its boxes."""
    stages = pd.DataFrame(
        {"stage": ["lda"], "status": "succeeded", "started_at": "2026-01-01T00:00:00Z",
         "duration_s": 1.0, "run_id": "id", "device": "cpu"}
    )  # fmt: skip
    last = tables["study_history"].groupby(["dataset", "optimizer", "run"], sort=False).tail(1)
    finals = last[["dataset", "optimizer", "run"]].assign(best_perplexity=last["best_value"])
    every = {**tables, "stages": stages, "studies": finals}
    declared = Declarations("A study.", TABLES, {"stages": STAGES})
    settings = "lda: {runs: 3, seed: 0}\n"
    about = RunResults(every, "study", "raypipe run s.yaml", settings, declared, sections(tables))
    (answers,) = summary_section(about).parts
    assert isinstance(answers, Answers)
    return about, {title: list(parts) for title, parts in answers.answers}


def test_an_optimizer_that_all_tests_put_first_is_named_the_winner():
    tables = tables_of(studies(12, bisect=3, ga=5, random=7), FITS)
    assert verdicts(tables)[0] == (
        "bisect won: its area under curve is lower than that of every other optimizer (p ≤ 0.05 in "
        "paired tests over 12 runs, Holm's correction)."
    )
    assert first_screen(tables)[1]["What to do next"] == ["The tables suggest no next step."]


@pytest.mark.parametrize(
    ("runs", "reach", "advice"),
    [
        (3, {"bisect": 2, "ga": 5, "random": 7}, "3 runs cannot tell the optimizers apart: paired "
         "tests of all pairs take 7. Set lda.runs=7."),
        (1, {"bisect": 2, "random": 7}, "1 run cannot tell the optimizers apart: paired tests of "
         "all pairs take 6. Set lda.runs=6."),
    ],
)  # fmt: skip
def test_too_few_runs_name_no_winner_and_one_number_of_runs_is_asked_for(runs, reach, advice):
    tables = tables_of(studies(runs, **reach), FITS)
    text, boxes = verdicts(tables)[0], first_screen(tables)[1]
    assert text.startswith("No winner: bisect has the lowest average rank by area under curve")
    assert "but no test tells bisect from another optimizer (p ≤ 0.05 in paired tests over" in text
    assert boxes["What to do next"] == [advice]
    assert text in boxes["What came out"]


def test_a_tie_of_all_optimizers_is_named_and_no_repetition_is_asked_for():
    names = ("ga", "es", "tpe", "pso", "sa", "de", "random", "bisect", "gp_ei")
    values = {name: [[30.0 + run, 20.0, 10.0 + run] for run in range(3)] for name in names}
    about, boxes = first_screen(tables_of(values, FITS))
    assert about.result == "best_perplexity 11 (ga, es, tpe and 3 more, mean of 3)"
    (tiles,) = (part for part in boxes["What came out"] if isinstance(part, Tiles))
    assert tiles.tiles[0].note.startswith("ga, es, tpe and 3 more; the same as ")
    assert boxes["How certain"][1] == (
        "Of 144 paired tests of two optimizers (all measures, Holm's correction), none finds a "
        "difference."
    )
    assert boxes["What to do next"] == ["The tables suggest no next step."]


def test_an_optimizer_that_the_tests_put_below_the_first_rank_is_named():
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
    assert verdicts(tables_of(values, FITS))[0] == (
        "No winner: bisect has the lowest average rank by area under curve, but the tests find ga "
        "lower than bisect (p ≤ 0.05 in paired tests over 20 runs, Holm's correction)."
    )


def test_the_optimum_and_its_equals_are_said():
    text = verdicts(tables_of(studies(3, bisect=2, random=7), FITS))[1]
    assert "The lowest mean, 10, is at T = 11, inside the range from 2 to 60; T = 8 to 16" in text
    assert "are within the noise of it (standard deviation over LDA seeds: 0.1633)." in text
    edge = tables_of(studies(3, bisect=2, random=7), fits({2: [1.0, 1.1], 9: [3.0, 3.1]}))
    assert "at T = 2, at the end of the range from 2 to 9" in verdicts(edge)[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_studies_without_a_value_have_no_verdict_on_them(value):
    lost = tables_of({"a": [[value] * 3] * 2, "b": [[value] * 3] * 2}, [])
    assert all("won" not in text for text in verdicts(lost))
