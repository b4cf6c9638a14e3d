"""The first screen: what was asked, what came out, how certain it is, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED
from raypipe.hardware import bytes_text
from raypipe.report.about import About
from raypipe.report.advice import advice
from raypipe.report.evaluations import Evaluation
from raypipe.report.formatting import cell, heading, number
from raypipe.report.headlines import Headline, range_tiles, tile
from raypipe.report.plots import rows
from raypipe.report.sections import Answers, Part, Section, Tile, Tiles
from raypipe.report.sweep_trials import SWEEP, Sweep, of_stage, short, sweeps
from raypipe.report.table_shape import point_label

_MOST_TILES = 6
_MOST_OTHERS = 2  # metrics of a training whose better end is unknown
_LONGEST = 120  # characters of the list of varied keys


def summary_section(about: About) -> Section:
    """Return the summary of a run, from its declared tables only; empty if no stage is recorded."""
    if rows(about.tables, "stages", ["stage", "status"]) is None:
        return Section("Summary", [])
    return Section(
        "Summary",
        [
            Answers(
                [
                    ("What was asked", [" ".join(asked(about))]),
                    ("What came out", came_out(about)),
                    ("How certain", list(certainty(about))),
                    ("What to do next", advice(about)),
                ]
            )
        ],
    )


def asked(about: About) -> Iterator[str]:
    """Yield what the experiment does, what was varied, what is done, and the hardware."""
    sentence = about.declared.sentence
    if sentence:
        yield sentence if sentence.endswith(".") else f"{sentence}."
    if varied := _varied(about):
        yield varied
    for sweep in sweeps(about.tables):
        axes = ", ".join(short(key, sweep.stage) for key in sweep.axes)
        over = f" over {axes}" if axes else ""
        yield f"A sweep of {sweep.stage}{over}: {len(sweep.trials)} trials."
    stages = about.tables["stages"]
    done, total = int((stages["status"] == "succeeded").sum()), len(stages)
    if total:
        yield f"{done} of {total} stage{'s' * (total > 1)} succeeded."
    if hardware := _hardware(about.tables.get("environment")):
        yield hardware


def _varied(about: About) -> str:
    keys = {key: len(values) for key, values in about.varied.items() if len(values) > 1}
    if not keys:
        compared = [results for results in about.results if results.headlines]
        counts = {
            heading(name): int(results.own[name].nunique())
            for results in compared
            for name in results.shape.axes
        }
        keys = {name: count for name, count in counts.items() if count > 1}
        repeated = max((best.runs for best in about.headlines), default=1)
        keys |= {SEED: repeated} if repeated > 1 else {}
        word = "Compared"
    else:
        word = "Varied"
    seeds = keys.pop(SEED, 0)
    named = [f"{key} ({count} values)" for key, count in keys.items()]
    if seeds:
        named.append(f"{seeds} seeds")
    text = ", ".join(named)
    if not text:
        return ""
    return f"{word}: {text if len(text) <= 4 * _LONGEST else f'{len(keys)} keys'}."


def _hardware(environment: pd.DataFrame | None) -> str:
    """Return the nodes of the last command."""
    if environment is None or environment.empty or "hostname" not in environment:
        return ""
    nodes = environment
    if "command_id" in nodes and "started_at" in nodes and nodes["started_at"].notna().any():
        latest = nodes.sort_values("started_at", kind="stable")["command_id"].iloc[-1]
        nodes = nodes[nodes["command_id"] == latest]
    nodes = nodes.drop_duplicates("hostname")
    parts = []
    if "gpus" in nodes and nodes["gpus"].notna().any():
        parts.append(", ".join(dict.fromkeys(nodes["gpus"].dropna().astype(str))))
    else:
        parts.append("no GPU")
    if "cpus" in nodes and nodes["cpus"].notna().any():
        parts.append(f"{nodes['cpus'].sum():.0f} CPUs")
    if "memory_bytes" in nodes and nodes["memory_bytes"].notna().any():
        parts.append(bytes_text(float(nodes["memory_bytes"].sum())))
    count = len(nodes)
    return f"On {count} node{'s' * (count > 1)}: {', '.join(parts)}."


def came_out(about: About) -> list[Part]:
    """Return the recommendations of sweeps, the headline numbers, then those of the trainings."""
    swept = list(sweep_tiles(about))
    tiles = [*swept, *(tile(best) for best in about.headlines)]
    if not tiles:
        for results in about.results:
            tiles += range_tiles(results.rows, results.shape)
    training = list(training_tiles(about))
    shown = [*tiles[: max(1, _MOST_TILES - len(training))], *training][: _MOST_TILES + 2]
    if not shown:
        return ["No table has a number."] if about.declared.core is not None else []
    parts: list[Part] = [Tiles(shown)]
    losing = [best for best in about.headlines if best.baseline and best.gain <= 0]
    if losing:
        best = losing[0]
        parts.append(
            f"{best.point or 'The best row'} is not better than the baseline {best.baseline} in "
            f"{best.name}."
        )
    if len(tiles) > len(shown) - len(training):
        parts.append("More numbers are in the sections below.")
    return parts


def sweep_tiles(about: About) -> Iterator[Tile]:
    """Yield the value and the settings of each recommended trial."""
    for sweep in sweeps(about.tables):
        recommended = of_stage(about.tables, "recommendations", sweep.stage)
        if "value" not in recommended or not sweep.metric or not sweep.chosen:
            continue
        value = float(pd.to_numeric(recommended["value"], errors="coerce").iloc[0])
        if not np.isfinite(value):
            continue
        doubt = "" if sweep.decided else "; cannot tell which trial is the best"
        yield Tile(
            heading(sweep.metric),
            cell(sweep.metric, value),
            f"recommended for {sweep.stage}: {_settings(sweep)}{doubt}",
            "" if sweep.decided else "warn",
        )


def _settings(sweep: Sweep) -> str:
    """Return the values of the axes of the recommended trial."""
    points = sweep.all_trials.loc[sweep.all_trials["trial_id"] == sweep.chosen, "point"]
    point = points.iloc[0] if len(points) else {}
    keys = sweep.axes or list(point)
    return point_label({short(key, sweep.stage): point[key] for key in keys if key in point})


def training_tiles(about: About) -> Iterator[Tile]:
    """Yield the best held-out value of each stage, or the training losses without evaluations."""
    by_stage: dict[str, list[Evaluation]] = {}
    for evaluation in about.evaluations:
        if evaluation.better:
            by_stage.setdefault(evaluation.stage, []).append(evaluation)
    for stage, found in by_stage.items():
        same = [each for each in found if each.metric == found[0].metric]
        best = min(same, key=lambda each: float(each.costs.min()))
        step, value = best.steps[best.best], float(best.values[best.best])
        end = float(best.values[-1])
        note = f"{stage}, best at step {step:.0f}" if value != end else f"{stage}, at the end"
        if value != end:
            note += f"; {number(end)} at the end"
        yield Tile(best.name, number(value), note, "warn" if best.ends_worse else "")
        yield from _other_metrics(about, best.trial)
    trials = rows(about.tables, "trials", ["stage", "status"])
    if by_stage or about.headlines or trials is None or "loss_final" not in trials:
        return
    for name, group in trials[trials["stage"] != SWEEP].groupby("stage", sort=False):
        losses = group["loss_final"].astype(float)
        if np.isfinite(losses).any():
            yield Tile("training loss", number(float(losses.min())), str(name))


def _other_metrics(about: About, trial: str) -> Iterator[Tile]:
    """Yield the last values of the held-out metrics of a training of which neither end is better.

    A task need not declare its metrics; a reader looks for the accuracy of a classifier all the
    same.
    """
    others = [each for each in about.evaluations if each.trial == trial and not each.better]
    for each in others[:_MOST_OTHERS]:
        yield Tile(each.name, number(float(each.values[-1])), f"{each.stage}, at the end")


def certainty(about: About) -> Iterator[str]:
    """Yield the number of repetitions, and what the intervals allow to say."""
    repeated = [best for best in about.headlines if best.runs > 1]
    if not repeated:
        if about.headlines or about.evaluations:
            yield once(about)
        return
    least, most = min(b.runs for b in repeated), max(b.runs for b in repeated)
    count = str(most) if least == most else f"{least} to {most}"
    yield f"Means of {count} repetitions; ± is Student's 95 % confidence interval."
    yield from _against_rivals(repeated[0])


def once(about: About) -> str:
    """Return that there is no interval, and how to get one."""
    if about.seeds:
        return "One run, no interval: repeat with --matrix runs=5."
    return "One run, no interval: nothing is known about chance."


def _against_rivals(best: Headline) -> Iterator[str]:
    """Yield whether the interval of a headline includes the baseline, and the second best point."""
    if not np.isfinite(best.half):
        return
    if best.baseline:
        if best.includes(best.baseline_mean):
            yield (
                f"The interval of {best.name} includes the baseline {best.baseline}: the "
                "difference may be chance."
            )
        else:
            yield f"The interval of {best.name} excludes the baseline {best.baseline}."
    if best.runner_up and best.includes(best.runner_up_mean):
        second = f"{best.runner_up} ({cell(best.column.name, best.runner_up_mean)})"
        yield f"It includes the second best, {second}: which is better cannot be told."
