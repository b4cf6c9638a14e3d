"""Section of the report on the race of a matrix: its rounds, and which points were dropped when."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd
from matplotlib.ticker import MaxNLocator

from raypipe.config.levels import nested
from raypipe.config.matrix import point_text, value_text
from raypipe.config.yaml_text import dump_yaml
from raypipe.report import plots
from raypipe.report.comparison import Tables
from raypipe.report.formatting import number, short_labels
from raypipe.report.plots import Plot, rows
from raypipe.report.sections import Code, Fold, Part, Pill, Section, TableView, cells

_MOST_LINES = 9
_LONGEST = 24  # characters of a label
_CHARACTER = 0.0125  # width of one, in units of the figure
_TONES = {"winner": "good", "dropped": "warn", "failed": "bad"}


def race_section(tables: Tables) -> Section:
    """Return the verdict, the means of all points by seeds, and the last state of each point."""
    race = rows(tables, "race")
    if race is None:
        return Section("Race", [])
    last = race.sort_values("round", kind="stable").groupby("point", sort=False).tail(1)
    last = last.sort_values(["round"], ascending=False, kind="stable")
    parts: list[Part] = [_verdict(race, last)]
    with plots.style():
        if (plot := means_plot(race)) is not None:
            parts.append(plot)
    names = [_name(point) for point in last["point"]]
    statuses = [Pill(status, _TONES.get(status, "")) for status in last["status"]]
    shown = last.assign(
        point=cells(Code(name) for name in names), status=cells(statuses), last_round=last["round"]
    )
    columns = ["point", "status", "mean", "runs", "last_round", "p_holm", "runs_needed"]
    emphasized = list(last["status"] == "winner")
    parts.append(TableView(shown, columns, "Points of the race", emphasized))
    for point in last[last["status"] == "winner"]["point"]:
        text = dump_yaml(nested(json.loads(point)))
        parts.append(Fold("Configuration of the winner", [Code(text)]))
    return Section("Race", parts)


def means_plot(race: pd.DataFrame) -> Plot | None:
    """Draw the mean of each point over the seeds so far, up to the round that dropped it."""
    if race["round"].nunique() < 2:
        return None
    points = list(dict.fromkeys(race["point"]))
    labels, title = _labels(points)
    longest = max(map(len, labels.values())) * _CHARACTER
    figure, axes = plots.new_axes(width=(0.885 - longest) / 1.1, height=0.74)
    strokes = plots.strokes(points)
    most = int(race["runs"].max())
    ends = []
    for point in points:
        own = race[(race["point"] == point) & race["mean"].notna()].sort_values("round")
        if own.empty:
            continue
        stroke = strokes[point]
        axes.plot(own["runs"], own["mean"], color=stroke.color, linestyle=stroke.line)
        end = (float(own["runs"].iloc[-1]), float(own["mean"].iloc[-1]))
        status = own["status"].iloc[-1]
        if status != "contender":
            marker = "o" if status == "winner" else "X"
            axes.plot(*end, marker, color=stroke.color, markersize=6, clip_on=False)
        if end[0] == most:
            ends.append((end[1], labels[point], stroke))
        elif len(points) <= _MOST_LINES:
            text = labels[point]
            axes.annotate(text, end, (7, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlabel("seeds of each point")
    axes.set_xlim(race["runs"].min() - 0.03 * (most - race["runs"].min()), most)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title(title)
    plots.frame_y(axes, race["mean"].dropna(), ratio=30)
    if len(ends) <= _MOST_LINES:
        plots.label_lines(axes, ends)
    caption = "A cross is where a point was dropped, a dot the winner."
    return Plot("race-means", "Means of the points in the race", caption, figure)


def _verdict(race: pd.DataFrame, last: pd.DataFrame) -> str:
    final = race[race["round"] == race["round"].max()]
    runs, rounds = int(final["runs"].iloc[0]), int(race["round"].max())
    text = f"{len(last)} points, {rounds} rounds, up to {runs} seeds."
    winners = last[last["status"] == "winner"]
    if len(winners):
        row = winners.iloc[0]
        return f"{text} {_name(row['point'])} wins with a mean of {number(float(row['mean']))}."
    left = final[final["status"] == "contender"]
    text += f" Undecided between {len(left)} points."
    needed = left["runs_needed"].dropna() if "runs_needed" in left else left["mean"].iloc[:0]
    if len(needed):
        text += (
            f" A decision needs about {needed.max():.0f} seeds of each (Noether's formula for a "
            "power of 80 %): raise `most_runs`, or take any of them."
        )
    elif len(left) > 1:
        text += " No difference is in sight: take any of them."
    return text


def _name(point: str) -> str:
    return point_text(json.loads(point))


def _labels(points: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return a short label of each point, and a title; the key of a single axis is in the title."""
    values = {point: json.loads(point) for point in points}
    keys = list(dict.fromkeys(key for each in values.values() for key in each))
    if len(keys) == 1:
        labels = {point: value_text(each[keys[0]]) for point, each in values.items()}
        title = f"mean over seeds by {keys[0]}"
    else:
        title = "mean over seeds"
        labels = {
            point: point_text({key.rpartition(".")[2]: value for key, value in each.items()})
            for point, each in values.items()
        }
    return dict(zip(labels, short_labels(list(labels.values()), _LONGEST), strict=True)), title
