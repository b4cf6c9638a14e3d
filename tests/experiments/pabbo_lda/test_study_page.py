from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.study_page import Published, against_baseline, page, spread, write_page
from experiments.pabbo_lda.study.comparison import MEASURES, aggregate
from raypipe.report.formatting import MISSING

SETTINGS = {"runs": 3, "evaluations": 6, "start": [700, 500], "policy": {"file": "/secret/path"}}
PUBLISHED = Published(
    {"20news": {"GA": {"mean": 1776.345, "std": 185.936}, "ES": {"mean": 2056.9, "std": 173.3}}},
    {"GA": 4.4, "ES": 53.8},
)


def tables(dataset: str = "20news") -> dict[str, pd.DataFrame]:
    rows = []
    for o, optimizer in enumerate(["ga", "es", "tpe"]):
        for run in range(3):
            rng = np.random.default_rng([o, run])
            values = [3000.0, 2500.0, *rng.uniform(1500, 2000 + 100 * o, 4)]
            for i, value in enumerate(values):
                best = min(values[: i + 1])
                rows.append({
                    "dataset": dataset, "optimizer": optimizer, "run": run, "seed": 42 + run,
                    "evaluation": i + 1, "batch": max(0, i - 1), "T": 100 - i, "value": value,
                    "best_T": 100 - values.index(best), "best_value": best,
                    "elapsed_s": 10.0 * (i + 1),
                    "cpu_s": 10.0 * (i + 1),
                })  # fmt: skip
    derived = {name: pd.DataFrame(list(found.values())) for name, found in aggregate(rows).items()}
    node = {"hostname": "secret-host", "git_commit": "0123abcd", "python": "3.11.7"}
    environment = [node | {"git_dirty": False}] * 2 + [node | {"git_dirty": True}]
    return {
        **derived,
        "study_history": pd.DataFrame(rows),
        "evaluations": pd.DataFrame({"duration_s": [2.0] * 50, "cpu_s": [1.5] * 50}),
        "environment": pd.DataFrame(environment),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("studies") / "reduced"
    write_page(tables(), SETTINGS, out, PUBLISHED)
    return out


def test_the_page_and_its_figures_are_all_that_is_written(written):
    text = (written / "results.md").read_text()
    assert sorted(path.name for path in written.iterdir()) == ["figures", "results.md"]
    linked = set(re.findall(r"\(figures/([^)]+)\)", text))
    assert linked == {path.name for path in (written / "figures").iterdir()}
    kinds = {name.partition("-")[0] for name in linked}
    assert kinds == {"best_by_evaluation", "best_by_time"}


def test_the_page_says_where_it_comes_from_and_names_no_machine(written):
    text = (written / "results.md").read_text()
    assert "50 different evaluations taking 1 min 15 s of CPU time" in text
    assert "- commit: 0123abcd, 0123abcd with uncommitted changes\n" in text
    assert "python 3.11.7" in text
    assert "2 start points" in text
    assert "secret" not in text


def test_every_row_of_a_table_has_the_columns_of_its_header(written):
    for block in re.findall(r"(?:^\|.*\n)+", (written / "results.md").read_text(), re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_published_values_stand_beside_ours_at_equal_evaluations(written):
    text = (written / "results.md").read_text()
    found = tables()
    assert "| published GA | 1776.35 ± 185.94 | 4.4 |" in text
    assert "| published ES | 2056.90 ± 173.30 | 53.8 |" in text
    mean = found["summary"].set_index("optimizer").loc["tpe"]
    assert f"| `tpe` | {mean['mean']:.2f} ± {mean['std']:.2f} | 6.0 |" in text
    best = found["study_history"].groupby(["optimizer", "evaluation"])["best_value"].mean()
    assert f"| `ga` | 4 | {best['ga', 4]:.2f} |" in text
    assert f"| `ga` | 6 | {best['ga', 6]:.2f} |" in text  # 53.8 is more than was made


def test_other_corpora_have_nothing_published_beside_them(tmp_path):
    write_page(tables("stdlib"), SETTINGS, tmp_path, PUBLISHED)
    assert "published" not in (tmp_path / "results.md").read_text()


def test_studies_that_search_the_priors_have_nothing_published_beside_them(tmp_path):
    write_page(tables(), {**SETTINGS, "eta": [0.001, 1.0]}, tmp_path, PUBLISHED)
    assert "published" not in (tmp_path / "results.md").read_text()


def test_every_measure_has_its_ranking():
    text = page("x", tables(), {}, [], None)
    assert text.count("Average ranks") == 1
    unknown = ("evaluations_to_noise", "confirmed_value")  # the studies have one seed each
    for measure in MEASURES:
        assert (f"### By {measure.replace('_', ' ')}" in text) == (measure not in unknown)


def reached(gp: float, *columns: tuple[str, float]) -> dict[str, pd.DataFrame]:
    """Return areas of ten runs: those of ``gp_ei`` and, per optimizer, a multiple of them."""
    base = gp * np.arange(1, 11)
    frames = [
        pd.DataFrame({"dataset": "c", "optimizer": name, "run": range(10),
                      "area_under_curve": factor * base})
        for name, factor in [("gp_ei", 1.0), *columns]
    ]  # fmt: skip
    return {"convergence": pd.concat(frames, ignore_index=True)}


def test_every_optimizer_is_tested_against_the_gaussian_process_by_area():
    lines = against_baseline(reached(0.01, ("tpe", 2.0), ("pfn_ei", 0.5), ("ga", 1.0)))
    cells = dict(re.findall(r"\| `(\w+)` \| (.*) \|", lines))
    assert cells == {  # 2 / 2 ** 10, times the optimizers that are left
        "ga": "0 of 0, p = 1",
        "tpe": "**higher**, 0 of 10, p = 0.0059",
        "pfn_ei": "**lower**, 10 of 10, p = 0.0059",
    }


def test_without_the_gaussian_process_or_an_area_nothing_is_tested_against_it():
    assert against_baseline(tables()) == ""
    assert against_baseline(reached(float("nan"), ("tpe", 2.0))) == ""


def test_a_negative_objective_has_its_best_value_as_the_figure_and_four_decimal_places(tmp_path):
    found = tables()
    history = found["study_history"]
    for name in ("value", "best_value"):
        history[name] = history[name] / 10_000 - 1
    derived = aggregate(history.to_dict("records"))
    found |= {name: pd.DataFrame(list(rows.values())) for name, rows in derived.items()}
    write_page(found, {"objective": "coherence"}, tmp_path, None)
    text = (tmp_path / "results.md").read_text()
    mean = found["summary"].set_index("optimizer").loc["tpe"]
    assert f"| `tpe` | {mean['mean']:.4f} ± {mean['std']:.4f} | 6.0 |" in text
    assert "objective coherence" in text


def test_censored_runs_are_counted_and_their_quartiles_left_open():
    reached = pd.DataFrame(
        {"dataset": "c", "optimizer": ["ga"] * 4 + ["es"] * 2 + ["tpe"], "needed":
         [3, 5, None, None, None, None, 7]}
    )  # fmt: skip
    lines = spread(reached, "needed").splitlines()
    assert lines[2:] == [
        f"| `ga` | {MISSING} [4.5, {MISSING}] (2/4) |",
        f"| `es` | {MISSING} (0/2) |",
        "| `tpe` | 7 [7, 7] |",
    ]
