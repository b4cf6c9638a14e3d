"""The report: one self-contained HTML page, and its figures as PNG and SVG beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd

from raypipe.report.formatting import heading, number, plus_minus, probability
from raypipe.report.html import (
    facts_list,
    fold,
    html_table,
    inline_figure,
    section,
    status_mark,
)
from raypipe.report.plots import Figure, encode, rows, slug
from raypipe.report.sweep_page import sweep_section
from raypipe.report.sweep_trials import SWEEP
from raypipe.stats import ALPHA

Tables = Mapping[str, pd.DataFrame]

_HERE = Path(__file__).parent
_REPEAT = ("command", "configuration")
_TRIAL_COLUMNS = (
    "trial_id",
    "status",
    "precision",
    "micro_batch",
    "accumulation",
    "workers",
    "effective_batch",
    "steps",
    "samples_per_s",
    "step_time_s",
    "gpu_util_mean",
    "gpu_peak_bytes",
    "energy_j",
    "loss_final",
    "attempts",
    "device",
)
_SUMMARY_COLUMNS = (
    "optimizer",
    "mean ± std",
    "median",
    "min",
    "max",
    "best_T_median",
    "evaluations_mean",
    "duration_s_mean",
    "runs",
)


def report_files(
    tables: Tables, figures: Sequence[Figure], title: str, facts: Mapping[str, str]
) -> dict[str, bytes]:
    """The content of the report's files by their names, ``index.html`` last.

    ``facts`` are shown under the title in their order, apart from ``command`` and
    ``configuration``, which tell how to repeat the run. Tables that are missing or empty leave
    their section out. Raises ValueError when a table lacks a column it must have, or two figures
    share a name.
    """
    files: dict[str, bytes] = {}
    svgs: list[bytes] = []
    for figure in figures:
        name = f"figures/{slug(figure.name)}"
        if f"{name}.svg" in files:
            raise ValueError(f"two figures are named {figure.name!r}; names must differ")
        encoded = encode(figure)
        files |= {f"{name}.{kind}": content for kind, content in encoded.items()}
        svgs.append(encoded["svg"])
    bodies = {
        ("failures", "Failures"): _failures(tables),
        ("stages", "Stages"): _stages(tables),
        ("results", "Results"): _results(tables),
        ("sweep", "Sweep"): sweep_section(tables),
        ("figures", "Figures"): _figures(figures, svgs),
        ("statistics", "Statistics"): _statistics(tables),
        ("training", "Training runs"): _trials(tables),
        ("environment", "Environment"): _environment(tables),
        ("repeat", "How to repeat"): _repeat(facts),
        ("tables", "Tables"): _tables(tables),
    }
    shown = {key: body for key, body in bodies.items() if body}
    links = (f'<li><a href="#{i}">{escape(text)}</a></li>' for i, text in shown)
    alert = "alert recovered" if _status(tables) == "succeeded" else "alert"
    page = Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=(_HERE / "style.css").read_text(encoding="utf-8").strip(),
        header=_header(tables, title, facts),
        nav=f"<ul>{''.join(links)}</ul>",
        sections="\n".join(
            section(i, text, body, alert if i == "failures" else "")
            for (i, text), body in shown.items()
        ),
    )
    files["index.html"] = page.encode()
    return files


def _status(tables: Tables) -> str:
    """The worst status of any stage; empty when none is recorded."""
    stages = rows(tables, "stages", ["stage", "status"])
    if stages is None:
        return ""
    present = set(stages["status"].astype(str))
    order = ("failed", "out_of_memory", "interrupted")
    return next((status for status in order if status in present), "succeeded")


def _header(tables: Tables, title: str, facts: Mapping[str, str]) -> str:
    status = _status(tables)
    mark = status_mark(status) if status else ""
    shown = {name: value for name, value in facts.items() if name not in _REPEAT}
    return f'<div class="title"><h1>{escape(title)}</h1>{mark}</div>\n{facts_list(shown)}'


def _failures(tables: Tables) -> str:
    failures = rows(tables, "failures", ["stage", "unit", "attempt", "kind", "message"])
    if failures is None:
        return ""
    result = (failures["stage"] == SWEEP) & (failures["kind"] == "out_of_memory")
    failures = failures[~result]
    if failures.empty:
        return ""
    count = len(failures)
    attempts = "1 attempt failed" if count == 1 else f"{count} attempts failed"
    recovered = _status(tables) == "succeeded"
    kinds = failures["kind"].astype(str)
    counts = kinds.str.replace("_", " ").value_counts()
    parts = ", ".join(f"{escape(str(kind))} ({n})" for kind, n in counts.items())
    messages = failures["message"].fillna("").astype(str)
    cells = {
        "kind": [status_mark(kind, "bad") for kind in kinds],
        "message": [f"<span>{escape(text)}</span>" for text in messages],
    }
    columns = ["kind", "message", "unit", "stage", "attempt"]
    table = html_table(failures, columns, "Failed attempts", cells=cells)
    end = " Every stage succeeded in the end." if recovered else ""
    return f"<p>{attempts}: {parts}.{end}</p>\n{table}"


def _stages(tables: Tables) -> str:
    stages = rows(tables, "stages", ["stage", "status", "started_at", "duration_s"])
    if stages is None:
        return ""
    started = pd.to_datetime(stages["started_at"], utc=True)
    stages = stages.assign(started_at=started).sort_values("started_at", kind="stable")
    from_first = (stages["started_at"] - started.min()).dt.total_seconds()
    end = float((from_first + stages["duration_s"]).max()) or 1.0
    bars = []
    for offset, length in zip(from_first, stages["duration_s"].astype(float), strict=True):
        known = np.isfinite(offset) and np.isfinite(length) and np.isfinite(end)
        place = f"margin-left:{100 * offset / end:.2f}%;width:{100 * length / end:.2f}%"
        bars.append(f'<span class="track"><i style="{place}"></i></span>' if known else "")
    cells = {"status": [status_mark(str(status)) for status in stages["status"]], "timeline": bars}
    columns = ["stage", "status", "duration_s", "timeline", "started_at", "device"]
    return html_table(stages, [*columns, "gpu_peak_bytes"], "Stages", cells=cells)


def _compared(tables: Tables, name: str, columns: Sequence[str]) -> pd.DataFrame | None:
    """A table that compares optimisers; an experiment may give another one this name."""
    other = name in tables and not set(columns) <= set(tables[name].columns)
    return None if other else rows(tables, name, columns)


def _results(tables: Tables) -> str:
    summary = _compared(tables, "summary", ["dataset", "optimizer", "runs", "mean", "std"])
    if summary is None:
        return ""
    pairs = zip(summary["mean"].astype(float), summary["std"].astype(float), strict=True)
    summary = summary.assign(**{"mean ± std": [plus_minus(mean, std) for mean, std in pairs]})
    cards, parts = [], []
    for dataset, group in summary.groupby("dataset", sort=False):
        group = group.sort_values("mean", kind="stable")
        means = group["mean"].to_numpy(float)
        best = np.isfinite(means) & np.isclose(means, means.min(), rtol=1e-9)
        cards.append(_card(str(dataset), group[best]))
        table = html_table(group, _SUMMARY_COLUMNS, f"Results on {dataset}", emphasised=list(best))
        parts.append(f"<h3>{escape(str(dataset))}</h3>\n{table}")
    note = '<p class="muted">Lower is better. The lowest mean of each data set stands out.</p>'
    return f'<div class="cards">{"".join(cards)}</div>\n{"".join(parts)}\n{note}'


def _card(dataset: str, best: pd.DataFrame) -> str:
    """The lowest mean of a data set, and who reached it."""
    if best.empty:
        value, who = "no finite value", ""
    else:
        mean, *deviation = str(best["mean ± std"].iloc[0]).split(" ± ")
        value = escape(mean) + "".join(f" <small>± {escape(d)}</small>" for d in deviation)
        names = [str(name) for name in best["optimizer"]]
        others = f" and {len(names) - 2} more" if len(names) > 2 else ""
        runs = int(best["runs"].max())
        who = escape(", ".join(names[:2]) + others) + f" · {runs} run{'s' if runs > 1 else ''}"
    return (
        f'<div class="card"><div class="muted">{escape(dataset)}: lowest mean</div>'
        f'<div class="value">{value}</div><div>{who}</div></div>'
    )


def _figures(figures: Sequence[Figure], svgs: Sequence[bytes]) -> str:
    """The figures by group; a caption that a whole group shares is printed once, above it.

    Groups of one figure stand side by side, without a heading of their own.
    """
    groups: dict[str, list[tuple[Figure, bytes]]] = {}
    for figure, svg in zip(figures, svgs, strict=True):
        groups.setdefault(figure.group, []).append((figure, svg))
    parts: list[str] = []
    alone: list[str] = []
    for group, members in groups.items():
        first, svg = members[0]
        if len(members) == 1:
            title = f"{group}: {first.title}" if group else first.title
            alone.append(inline_figure(first, svg, title))
            continue
        shared = len({figure.caption for figure, _ in members}) == 1
        head = f"<h3>{escape(group)}</h3>\n" if group else ""
        head += f'<p class="muted">{escape(first.caption)}</p>\n' if shared else ""
        drawn = [inline_figure(f, svg, f.title, caption=not shared) for f, svg in members]
        parts += _grid(alone, "") + _grid(drawn, head)
        alone = []
    return "\n".join(parts + _grid(alone, ""))


def _grid(drawn: Sequence[str], head: str) -> list[str]:
    return [f'{head}<div class="figures">\n' + "\n".join(drawn) + "\n</div>"] if drawn else []


def _statistics(tables: Tables) -> str:
    """The tests of each data set and measure, then what the data sets have in common."""
    columns = ["dataset", "measure", "optimizer", "average_rank", "chi2", "p_value", "kendalls_w"]
    rankings = _compared(tables, "rankings", [*columns, "conclusion"])
    columns = ["dataset", "measure", "first", "second", "n", "p_value", "p_holm", "effect_size"]
    comparisons = _compared(tables, "comparisons", [*columns, "conclusion"])
    against = _compared(tables, "against_control", [*columns, "conclusion"])
    said: dict[tuple[str, str], list[str]] = {}
    for table, write in ((rankings, _ranking), (comparisons, _pairs), (against, _pairs)):
        if table is not None:
            for (dataset, measure), group in table.groupby(["dataset", "measure"], sort=False):
                said.setdefault((str(dataset), str(measure)), []).append(write(group))
    parts = []
    for dataset in dict.fromkeys(dataset for dataset, _ in said):
        parts.append(f"<h3>{escape(dataset)}</h3>")
        for (of, measure), texts in said.items():
            if of == dataset:
                parts += [f"<h4>{escape(heading(measure))}</h4>", *texts]
    return "\n".join([*parts, _across_corpora(tables)])


def _across_corpora(tables: Tables) -> str:
    columns = ["measure", "optimizer", "corpora", "average_rank", "wins", "kendalls_w"]
    across = _compared(tables, "across_corpora", [*columns, "conclusion"])
    if across is None:
        return ""
    across = across.sort_values(["measure", "average_rank"], kind="stable")
    across = across.assign(measure=[heading(str(measure)) for measure in across["measure"]])
    words = " ".join(_sentence(str(text)) for text in across["conclusion"].unique())
    table = html_table(across, [*columns, "p_value"], "Across corpora")
    return f"<h3>Across corpora</h3>\n<p>{escape(words)}</p>\n{table}"


def _ranking(ranking: pd.DataFrame) -> str:
    """The Friedman test in words and the average ranks on one line."""
    if ranking.empty:
        return ""
    first = ranking.iloc[0]
    words = " ".join(_sentence(str(text)) for text in ranking["conclusion"].dropna().unique())
    words = escape(words)
    if np.isfinite(float(first["p_value"])):
        words += (
            f' <span class="muted">Friedman χ² = {number(float(first["chi2"]))}, '
            f"p {probability(float(first['p_value']))}, "
            f"Kendall's W = {number(float(first['kendalls_w']))}.</span>"
        )
    ranked = ranking.dropna(subset="average_rank").sort_values("average_rank", kind="stable")
    names = zip(ranked["optimizer"], ranked["average_rank"], strict=True)
    line = ", ".join(f"{escape(str(name))} {number(float(rank))}" for name, rank in names)
    return f"<p>{words}</p>" + (f"\n<p>Average rank: {line}.</p>" if line else "")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def findings(pairs: pd.DataFrame) -> list[str]:
    """What the pairwise tests of one data set and measure found, in words."""
    found = pairs["p_holm"].astype(float) <= ALPHA
    said = []
    for conclusion, group in pairs.groupby("conclusion", sort=False):
        text = str(conclusion)
        if found[group.index].all():
            both = zip(group["first"], group["second"], strict=True)
            others = [str(b) if text.startswith(f"{a} ") else str(a) for a, b in both]
            said.append(f"{text} (against {', '.join(others)})")
        else:
            said.append(f"{text} ({len(group)} {'pair' if len(group) == 1 else 'pairs'})")
    return said


def _pairs(pairs: pd.DataFrame) -> str:
    """What the pairwise tests found, in words; all of them behind a line."""
    if pairs.empty:
        return ""
    found = pairs["p_holm"].astype(float) <= ALPHA
    body = "".join(f"<li>{escape(text)}</li>" for text in findings(pairs))
    body = f'<ul class="findings">{body}</ul>\n'
    columns = ["first", "second", "n", "p_value", "p_holm", "effect_size", "conclusion"]
    table = html_table(pairs, columns, "Pairwise comparisons")
    control = pairs["second"].unique()
    which = f"All {len(pairs)} pairs" if len(control) > 1 else f"Each against {control[0]}"
    title = f"{which}: Wilcoxon signed-rank tests with Holm's correction, "
    title += f"{int(found.sum())} with p ≤ {ALPHA}"
    return body + fold(title, table)


def _trials(tables: Tables) -> str:
    trials = rows(tables, "trials", ["trial_id", "stage", "status"])
    if trials is None:
        return ""
    trials = trials[trials["stage"] != SWEEP]
    cells = {"status": [status_mark(str(status)) for status in trials["status"]]}
    return html_table(trials, _TRIAL_COLUMNS, "Training runs", cells=cells)


def _environment(tables: Tables) -> str:
    nodes = rows(tables, "environment", ["hostname"])
    if nodes is None:
        return ""
    columns = [column for column in nodes.columns if column != "run_id"]
    return html_table(nodes.drop_duplicates(columns), columns, "Nodes that took part")


def _repeat(facts: Mapping[str, str]) -> str:
    body = ""
    if command := facts.get("command"):
        body += f"<pre><code>{escape(command)}</code></pre>\n"
    if configuration := facts.get("configuration"):
        body += fold("Resolved configuration", f"<pre><code>{escape(configuration)}</code></pre>")
    return body


def _tables(tables: Tables) -> str:
    known = {name: table for name, table in sorted(tables.items()) if not table.empty}
    if not known:
        return ""
    listing = pd.DataFrame(
        {
            "table": [f"results/{name}" for name in known],
            "rows": [len(table) for table in known.values()],
            "columns": [
                ", ".join(str(c) for c in table.columns if c != "run_id")
                for table in known.values()
            ],
        }
    )
    note = "<p>Parquet files, readable with pandas, polars or DuckDB.</p>\n"
    return note + html_table(listing, ["table", "rows", "columns"], "Tables of this run")
