"""Documentation page of a study, made from its run directory.

``python -m benchmarks.study_page RUN_DIR --out docs/studies/NAME`` writes ``results.md`` and the
figures (PNG and SVG) into the folder and nothing else; the discussion is in another file. For the
published corpora, the published values from ``$RAYPIPE_DATA`` or ``../shared/data`` are shown next
to ours.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from experiments.pabbo_lda.figures import by_optimizer, figures
from experiments.pabbo_lda.report_sections import findings
from experiments.pabbo_lda.study.comparison import MEASURES, NOISE, best_so_far
from raypipe.report.formatting import MISSING, duration, heading, number, probability
from raypipe.report.plots import encode, slug
from raypipe.stats import ALPHA, paired_comparisons
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_tables

Tables = Mapping[str, pd.DataFrame]

PROJECT = Path(__file__).resolve().parents[1]
KINDS = ("best_by_evaluation", "final_boxes")
#: figures that a study of recorded values does not have
OF_TIME = ("best_by_time",)
SETTINGS = (
    *("objective", "runs", "seed", "seeds", "final_seeds", "t_min", "t_max", "alpha", "eta"),
    *("evaluations", "iterations", "max_iter", "batch_size", "precision"),
)
#: baseline without training that every optimizer is compared with, and the measure
BASELINE, BASELINE_MEASURE = "gp_ei", "area_under_curve"
PACKAGES = ("python", "raypipe", "ray", "torch", "scikit_learn")


PUBLISHED = ("GA", "ES", "PABBO", "SABBO")


#: entries of the section on speed: text, column of ``convergence``, format of a number
_SPREADS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Evaluations after the start to within 5 %",
     "evaluations_beyond_start_to_5_percent", number),
    ("Evaluations after the start to within 1 %",
     "evaluations_beyond_start_to_1_percent", number),
    ("Evaluations after the start to within the noise of one value",
     "evaluations_beyond_start_to_noise", number),
    ("CPU time of a study's evaluations to within 1 %, including the start",
     "time_to_1_percent_s", duration),
    ("Area under the curve: the mean of log(best so far / best known) over the evaluations "
     "after the start, or of the difference where a best known value is not positive; 0 is perfect",
     "area_under_curve", number),
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Published final values by corpus and method, and distinct T per run of each method."""

    values: Mapping[str, Mapping[str, Mapping[str, float]]]
    evaluations: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> Published:
        """Return the values in the folder ``lda_published``."""
        start = json.loads((folder / "lda_init_population.json").read_text())["initial_population"]
        table = pd.read_csv(folder / "evaluations.csv.gz")
        values = json.loads((folder / "summary_tables/best_perplexity_mean_std.json").read_text())
        return cls(values, published_counts(table, start))


def published_counts(table: pd.DataFrame, start: Sequence[int]) -> dict[str, float]:
    """Return the mean number of distinct T per published run, including its start."""
    counts = {}
    for method in PUBLISHED:
        seen = table[[method in names.split("+") for names in table["seen_by"]]]
        runs = seen.groupby(["dataset", "seed"])["T"]
        counts[method] = float(runs.apply(lambda points: len({*points, *start})).mean())
    return counts


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a pipe table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_corpus(table: pd.DataFrame, column: str, write: str = "{}") -> dict[str, list[str]]:
    """Return the cells of each optimizer, one per corpus in alphabetical order."""
    wide = table.pivot(index="optimizer", columns="dataset", values=column).to_dict("index")
    return {
        name: [MISSING if pd.isna(cell) else write.format(cell) for cell in wide[name].values()]
        for name, _, _ in by_optimizer(table)
    }


def corpora_of(table: pd.DataFrame) -> list[str]:
    """Return the corpora in alphabetical order."""
    return sorted(table["dataset"].unique())


def lines_of(cells: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the lines of a table, one per optimizer."""
    return [[f"`{name}`", *rest] for name, rest in cells.items()]


def final_values(tables: Tables, published: Published | None) -> str:
    """Return mean and sample standard deviation of the final values, then the published ones."""
    summary = tables["summary"]
    made = summary.groupby("optimizer")["evaluations_mean"].mean()
    cells = by_corpus(summary.assign(texts=means(summary["mean"], summary["std"])), "texts")
    lines = lines_of({name: [*rest, f"{made[name]:.1f}"] for name, rest in cells.items()})
    datasets = corpora_of(summary)
    if published is not None:
        for method, count in published.evaluations.items():
            found = [published.values.get(name, {}).get(method) for name in datasets]
            texts = [f"{v['mean']:.2f} ± {v['std']:.2f}" if v else MISSING for v in found]
            lines.append([f"published {method}", *texts, f"{count:.1f}"])
    return markdown_table(["optimizer", *datasets, "evaluations made"], lines)


def means(mean: pd.Series, std: pd.Series) -> list[str]:
    """Return means with their standard deviations; small ones have four decimal places."""
    digits = 2 if mean.abs().max() >= 10 else 4
    return [f"{m:.{digits}f} ± {s:.{digits}f}" for m, s in zip(mean, std, strict=True)]


def confirmed_values(tables: Tables) -> str:
    """Return the values of the best points on unseen seeds; empty if there are none."""
    summary = tables["summary"]
    if "confirmed_mean" not in summary or summary["confirmed_mean"].isna().all():
        return ""
    texts = means(summary["confirmed_mean"].astype(float), summary["confirmed_std"].astype(float))
    cells = by_corpus(summary.assign(texts=texts), "texts")
    return markdown_table(["optimizer", *corpora_of(summary)], lines_of(cells))


def at_published_counts(tables: Tables, published: Published) -> str:
    """Return each published mean next to ours after the number of evaluations of its method."""
    history = tables["study_history"]
    datasets = corpora_of(history)
    best = {name: best_so_far(group, "best_value") for name, group in history.groupby("dataset")}
    longest = min(len(curve) for curve in best.values())
    lines = []
    for method, used in published.evaluations.items():
        count = min(round(used), longest)
        found = [published.values.get(name, {}).get(method) for name in datasets]
        texts = [f"{v['mean']:.2f}" if v else MISSING for v in found]
        lines.append([f"**published {method}**", f"{used:.1f}", *texts])
        values = pd.concat([curve.loc[[count]].T for curve in best.values()])
        mean = values.groupby(["dataset", "optimizer"]).mean().reset_index()
        ours = by_corpus(mean.rename(columns={count: "mean"}), "mean", "{:.2f}")
        lines += lines_of({name: [str(count), *cells] for name, cells in ours.items()})
    return markdown_table(["optimizer", "evaluations", *datasets], lines)


def spread(reached: pd.DataFrame, column: str, write: Callable[[float], str] = number) -> str:
    """Return the median and quartiles over runs of a column of ``convergence``.

    A missing value is censored: it counts as larger than any other, and the cell gives the number
    of runs with a value.
    """
    rows = []
    for (dataset, optimizer), runs in reached.groupby(["dataset", "optimizer"]):
        values = runs[column].astype(float)
        found = quartiles(values.fillna(np.inf).to_frame("value")).loc["value"].to_dict()
        texts = {str(k): write(v) if np.isfinite(v) else MISSING for k, v in found.items()}
        cell = "{median} [{q25}, {q75}]".format(**texts) if values.notna().any() else MISSING
        if values.isna().any():
            cell += f" ({values.count()}/{len(runs)})"
        rows.append({"dataset": dataset, "optimizer": optimizer, "cell": cell})
    table = pd.DataFrame(rows)
    return markdown_table(["optimizer", *corpora_of(table)], lines_of(by_corpus(table, "cell")))


def quartiles(values: pd.DataFrame) -> pd.DataFrame:
    """Return ``median``, ``q25`` and ``q75``, a row per column of ``values``.

    They are interpolated linearly, without missing values. An infinite value ranks last, and a
    quartile that depends on one is infinite: the median of partly censored times is infinite where
    it cannot be known.
    """
    table = values.astype(np.float64)
    highest = table.where(np.isfinite(table)).max().fillna(-np.inf)
    # inf - inf is NaN, so infinite values are ranked as the largest float
    found = table.replace(np.inf, np.finfo(np.float64).max).quantile([0.5, 0.25, 0.75])
    return found.mask(found > highest, np.inf).set_axis(["median", "q25", "q75"]).T


def ranking(tables: Tables, measure: str) -> str:
    """Return average ranks by corpus, and the outcomes of the tests."""
    ranks = tables["rankings"][tables["rankings"]["measure"] == measure]
    datasets = corpora_of(ranks)
    cells = by_corpus(ranks, "average_rank", "{:.2f}")
    header = ["optimizer", *datasets]
    pairs = tables["comparisons"][tables["comparisons"]["measure"] == measure]
    against = tables.get("against_control", pd.DataFrame())
    against = pairs[:0] if against.empty else against[against["measure"] == measure]
    notes = [
        _tests(*(table[table["dataset"] == name] for table in (ranks, pairs, against)))
        for name in datasets
    ]
    return f"{markdown_table(header, lines_of(cells))}\n\n" + "\n".join(notes)


def against_baseline(tables: Tables) -> str:
    """Return the paired tests of each optimizer against ``gp_ei`` by area; empty without it."""
    reached = tables["convergence"]
    rows = []
    for dataset, corpus in reached.groupby("dataset"):
        values = corpus.pivot(index="run", columns="optimizer", values=BASELINE_MEASURE)
        if BASELINE not in values or values.isna().all(axis=None):
            continue
        for _, pair in paired_comparisons(values.astype(float), BASELINE).iterrows():
            lower = int((values[pair["first"]] < values[BASELINE]).sum())
            differing = int(pair["n"] - pair["equal"])
            found = ""
            if pair["p_holm"] <= ALPHA:
                found = "**lower**, " if pair["effect"] < 0 else "**higher**, "
            cell = f"{found}{lower} of {differing}, p {probability(float(pair['p_holm']))}"
            rows.append({"dataset": dataset, "optimizer": pair["first"], "cell": cell})
    if not rows:
        return ""
    table = pd.DataFrame(rows)
    return markdown_table(["optimizer", *corpora_of(table)], lines_of(by_corpus(table, "cell")))


def _tests(ranks: pd.DataFrame, pairs: pd.DataFrame, against: pd.DataFrame) -> str:
    first = ranks.iloc[0]
    text = f"- {first['dataset']}: {first['conclusion']}"
    if pd.notna(first["p_value"]):
        text += f" (Friedman χ² = {number(first['chi2'])}, "
        text += f"p {probability(first['p_value'])}, Kendall's W = {number(first['kendalls_w'])})"
    for title, table in (("All pairs", pairs), ("Against random search", against)):
        if said := "; ".join(findings(table)):
            text += f". {title}: {said}"
    return f"{text}."


def provenance(tables: Tables, settings: Mapping[str, Any]) -> str:
    """Return the provenance of the numbers: settings, evaluations, time, code and packages."""
    lines = []
    used = {key: settings.get(key) for key in SETTINGS}
    if settings.get("objective") == "tabular":
        used["final_seeds"] = None  # recorded values have no further seeds
    chosen = [f"{key} {value}" for key, value in used.items() if value is not None]
    if settings.get("start"):
        chosen.append(f"{len(settings['start'])} start points")
    if chosen:
        lines.append(f"- settings (`lda`): {', '.join(chosen)}")
    studies = f"{len(tables['convergence'])} studies"
    evaluations = tables.get("evaluations", pd.DataFrame())
    if settings.get("objective") == "tabular":
        studies += f", {len(evaluations)} different evaluations looked up"
    elif len(evaluations):
        cpu = duration(float(evaluations["cpu_s"].sum()))
        studies += f", {len(evaluations)} different evaluations taking {cpu} of CPU time"
    lines.append(f"- {studies}")
    nodes = tables.get("environment", pd.DataFrame())
    if "git_commit" in nodes:
        changes = nodes["git_dirty"].eq(True).map({True: " with uncommitted changes", False: ""})
        commits = (nodes["git_commit"] + changes).dropna().unique()
        lines += [f"- commit: {', '.join(commits)}"] if len(commits) else []
    packages = [
        f"{column.replace('_', '-')} {value}"
        for column in PACKAGES
        if column in nodes
        for value in nodes[column].dropna().unique()
    ]
    if packages:
        lines.append(f"- packages: {', '.join(packages)}")
    return "\n".join(lines)


def page(
    title: str,
    tables: Tables,
    settings: Mapping[str, Any],
    pictures: Sequence[tuple[str, str]],
    published: Published | None,
) -> str:
    """Return the text of ``results.md``; ``pictures`` are captions and names without extension."""
    reached = tables["convergence"]
    parts = [
        f"# {title}\n\nMade by `python -m benchmarks.study_page`; do not edit. Lower is better.",
        provenance(tables, settings),
        "## Final values\n\nThe best value found: mean ± sample standard deviation over runs.",
        final_values(tables, published),
    ]
    if confirmed := confirmed_values(tables):
        parts += ["The same points, on LDA seeds that no search saw:", confirmed]
    if published is not None:
        parts += [
            "## At equal evaluations\n\nMeans after each published method's own number of distinct "
            "T, its start included, or after ours where that is smaller.",
            at_published_counts(tables, published),
        ]
    parts.append(
        "## Speed\n\nMedian [quartiles] over runs. A run that never came as close counts as later "
        f"than any other; {MISSING} is a quartile among such runs, and the number of runs that "
        "did come as close is in parentheses. The best known value of a corpus and seed is the "
        "smallest one of any study of this run."
    )
    for text, column, write in _SPREADS:
        if column not in reached or (NOISE in column and reached[column].isna().all()):
            continue
        if column.endswith("_s") and settings.get("objective") == "tabular":
            continue
        parts.append(f"{text}:\n\n{spread(reached, column, write)}")
    parts.append(
        "## Rankings\n\nAverage ranks, 1 is best, with runs as blocks: Friedman's test, then "
        "Wilcoxon's signed-rank test with Holm's correction, for every pair and, as a separate "
        "family that fewer runs can decide, for every optimizer against random search."
    )
    ranked = [name for name in MEASURES if (tables["rankings"]["measure"] == name).any()]
    parts += [f"### By {heading(name)}\n\n{ranking(tables, name)}" for name in ranked]
    if against := against_baseline(tables):
        parts += [
            f"### Against `{BASELINE}`\n\nThe area under the curve of each optimizer against that "
            f"of the Gaussian process: in how many of the runs that differ it is lower, and the "
            "p-value of Wilcoxon's test with Holm's correction for the optimizers of a corpus.",
            against,
        ]
    parts.append("## Figures")
    parts += [
        f"![{caption}](figures/{name}.png)\n\n{caption} ([SVG](figures/{name}.svg))"
        for caption, name in pictures
    ]
    return "\n\n".join(parts) + "\n"


def write_page(
    tables: Tables, settings: Mapping[str, Any], out: Path, published: Published | None
) -> None:
    """Write ``results.md`` and ``figures/`` into the folder."""
    if published is not None and not set(published.values) & set(tables["summary"]["dataset"]):
        published = None
    if any(settings.get(prior) for prior in ("alpha", "eta")):  # the published ones are 1/T
        published = None
    pictures = []
    kinds = KINDS if settings.get("objective") == "tabular" else (*KINDS, *OF_TIME)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures(tables):
        if figure.name.startswith(kinds):
            name = slug(figure.name)
            for kind, content in encode(figure).items():
                (out / f"figures/{name}.{kind}").write_bytes(content)
            pictures.append((f"{figure.title}: {figure.caption}", name))
    (out / "results.md").write_text(page(out.name, tables, settings, pictures, published))


def main() -> None:
    """Write the page of the run directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir")
    parser.add_argument("--out", type=Path, required=True, help="docs/studies/NAME")
    arguments = parser.parse_args()
    run = RunDirectory.at(arguments.run_dir)
    settings = yaml.safe_load(run.read(run.config))["lda"]
    data = Path(os.environ.get("RAYPIPE_DATA", PROJECT.parent / "shared/data")) / "lda_published"
    published = Published.read(data) if data.is_dir() else None
    write_page(read_tables(run), settings, arguments.out, published)


if __name__ == "__main__":
    main()
