"""The first screen: four boxes of at most three sentences, each made by one rule."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed
from raypipe.hardware import bytes_text
from raypipe.report.best import Headline, Rival
from raypipe.report.comparison import seeds_of
from raypipe.report.formatting import counted, heading, number, with_interval, with_unit
from raypipe.report.measures import PREFIX, better_by_name
from raypipe.report.parts import Answers, Code, Part, Section, Tile, Tiles
from raypipe.report.plots import rows
from raypipe.report.run_results import RunResults
from raypipe.report.studies import seeds_needed, sweep_asked
from raypipe.report.tables import range_tiles, tile
from raypipe.report.trainings import EvaluationCurve

_MOST_TILES = 8
_MOST_COLUMNS = 3  # with results that are not finite that are named
_MOST_SENTENCES = 3  # of an answer
_MOST_UNITS = 3
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")  # between two sentences


def summary_section(run: RunResults) -> Section:
    """Return the summary of a run, from its declared tables only; empty if no stage is recorded."""
    if rows(run.tables, "stages") is None:
        return Section("Summary", [])
    command: list[Part] = [Code(run.asked_command)] if run.asked_command else []
    answers: dict[str, list[Part]] = {
        "What was asked": [" ".join(asked(run)), *command],
        "What came out": came_out(run),
        "How certain": [*certainty(run)],
        "What to do next": next_step(run),
    }
    return Section("Summary", [Answers([(name, _short(parts)) for name, parts in answers.items()])])


def _short(parts: Sequence[Part]) -> list[Part]:
    """Return the parts of an answer without the paragraphs after its third sentence.

    raypipe's own answers are no longer; the sections of an experiment may say more.
    """
    kept: list[Part] = []
    count = 0
    for part in parts:
        count += len(_SENTENCE.findall(part)) + 1 if isinstance(part, str) else 0
        if count <= _MOST_SENTENCES or not isinstance(part, str):
            kept.append(part)
    return kept


def asked(run: RunResults) -> Iterator[str]:
    """Yield what the experiment does, what was varied, and what is done on which hardware."""
    sentence = _SENTENCE.split(run.declared.sentence, maxsplit=1)[0]
    if sentence:
        yield sentence if sentence.endswith(".") else f"{sentence}."
    if varied := "; ".join([*_varied(run), *sweep_asked(run.sweeps)]):
        yield f"{varied[0].upper()}{varied[1:]}."
    stages = run.tables["stages"]
    done, total, what = int((stages["status"] == "succeeded").sum()), len(stages), "stage"
    if run.calls is not None:
        done, total, what = *run.calls, "call"
    if total:
        yield f"{done} of {counted(total, what)} succeeded{_hardware(run)}."


def _varied(run: RunResults) -> Iterator[str]:
    """Yield the varied keys of the matrix, else the axes of the tables with a best result."""
    counts = {k: len(values) for k, values in run.varied.items() if not is_seed(k)}
    seeds, word = seeds_of(run.tables), "Varied"
    if not counts and seeds < 2:
        word = "Compared"
        shown = [each for each in run.results if each.headlines or each.table.open]
        for rows, shape in ((each.rows, each.shape) for each in shown):
            counts |= {heading(axis): rows[axis].nunique(dropna=False) for axis in shape.axes}
            seeds = max([seeds, *(rows[name].nunique() for name in shape.seeds)])
    keys = [f"{name} ({count} values)" for name, count in counts.items() if count > 1]
    if named := [*keys, *([f"{seeds} seeds"] * (seeds > 1))]:
        yield f"{word}: {', '.join(named)}"


def _hardware(run: RunResults) -> str:
    """Return the nodes of the last command, as the end of a sentence."""
    nodes = run.nodes.reindex(columns=["gpus", "cpus", "memory_bytes"])
    if nodes.empty:
        return ""
    gpus = ", ".join(dict.fromkeys(nodes["gpus"].dropna())) or "no GPU"
    memory = bytes_text(float(nodes["memory_bytes"].sum()))
    each = f"{gpus}, {nodes['cpus'].sum():.0f} CPUs, {memory} of memory"
    return f" on {counted(len(nodes), 'node')} ({each})"


def came_out(run: RunResults) -> list[Part]:
    """Return the experiment's findings, the headline numbers, and results that are not finite."""
    parts: list[Part] = [part for section in run.sections for part in section.findings]
    if shown := summary_tiles(run):
        parts.append(Tiles(shown))
    if texts := run.not_finite:
        more = len(texts) - _MOST_COLUMNS
        named = [text.rstrip(".") for text in texts[:_MOST_COLUMNS]]
        parts.append("; ".join([*named, *[f"{more} more are not"] * (more > 0)]) + ".")
    if not parts and run.declared.core is not None:
        parts.append("No table has a number.")
    return parts


def summary_tiles(run: RunResults) -> list[Tile]:
    """Return a tile for each best result and for the model of each training stage."""
    models = [] if run.varied else list(_models(run))
    trainings = [] if models else run.training_headlines
    named = {best.metric for best in run.measured}
    bests = [*run.measured, *(best for best in trainings if best.metric not in named)]
    tiles = [*map(tile, [*bests, *run.recommended]), *models]
    return (tiles or [each for of in run.results for each in range_tiles(of)])[:_MOST_TILES]


def _models(run: RunResults) -> Iterator[Tile]:
    """Yield the best model of each training stage by its first held-out metric.

    A model is that of the best step if held-out data chose it, else that of the last step.
    """
    by_stage: dict[str, list[EvaluationCurve]] = {}
    for each in (each for each in run.evaluations if each.column.better):
        by_stage.setdefault(each.stage, []).append(each)
    for stage, curves in by_stage.items():
        own = [each for each in curves if each.column == curves[0].column]
        best = min(own, key=lambda each: float(each.costs[each.kept]))
        at, column, values = best.kept, best.column, best.values
        note = f"{stage}, at the end"
        if best.chosen:
            note = f"{stage}, best of {counted(len(values), 'evaluation')}, at step "
            note += f"{best.steps[at]:.0f}; {number(float(values[-1]))} at the end"
        elif values[best.best] != values[-1]:
            note += f"; {number(float(values[best.best]))} at step {best.steps[best.best]:.0f}"
        if np.isfinite(rival := float(best.baseline_values[at])):
            note += f"; {best.baseline} {number(rival)}"
        is_bad = (best.ends_worse and not best.chosen) or not best.beats_baseline(at)
        label = with_unit(column.name, column.unit, column.better)
        yield Tile(label, number(float(values[at])), note, "warn" if is_bad else "")


def certainty(run: RunResults) -> Iterator[str]:
    """Yield what the run's tests say: the experiment's own, else the intervals over repetitions."""
    repeated = [best for best in run.headlines if best.runs > 1]
    if repeated:
        counts = dict.fromkeys(f([best.runs for best in repeated]) for f in (min, max))
        several = " to ".join(map(str, counts))
        yield f"Means of {several} repetitions; ± is Student's 95 % confidence interval."
    elif (run.headlines or run.evaluations) and not run.tested:
        several = " of each" if any(len(best.points) > 1 for best in run.headlines) else ""
        yield f"One run{several}, no interval over seeds."
    yield from run.tested
    for best in repeated[:1] if not run.tested else ():
        if best.baseline is not None:
            yield from _against(best, "the baseline", best.baseline)
        if best.ties == 1 and best.second is not None:
            yield from _against(best, "the second best,", best.second)


def _against(best: Headline, name: str, rival: Rival) -> Iterator[str]:
    """Yield on which side of a rival the best point is, and whether that may be chance."""
    if np.isfinite(rival.half):
        size = with_interval(best.column.name, abs(rival.gain), rival.half)
        side = "above" if (rival.gain > 0) == (best.column.better == "higher") else "below"
        judged = "it may be chance" if rival.may_be_chance else "more than chance"
        metric = f"{best.name[:1].upper()}{best.name[1:]}"
        yield f"{metric} is {size} {side} {name} {rival.label}: {judged}."


def next_step(run: RunResults) -> list[Part]:
    """Return the first of the next steps that applies, with what to type."""
    advised = [] if run.varied else [each.advice for each in run.sections if each.advice]
    steps = (_failed, _undirected, lambda _: next(iter(advised), ()), _overfitted, _repeat, _apply)
    found = (list(step(run)) for step in steps)
    return next(filter(None, found), ["The tables suggest no next step."])


def _failed(run: RunResults) -> Iterator[Part]:
    """Yield how to see the errors of what failed in the end, and how to continue."""
    stages = run.tables["stages"]
    bad = stages[stages["status"].isin(["failed", "out_of_memory"])]
    count, what = len(bad) or int((stages["status"] != "succeeded").sum()), "stage"
    if not count:
        return
    stored, wanted = run.calls or (0, 0)
    if stored < wanted:
        count, what = wanted - stored, "call"
    if bad.empty:
        yield f"{counted(count, what)} not done. Continue:"
    else:
        yield f"{counted(count, what)} failed. Read the error, then continue:"
    units = run.failures[run.failures["stage"].isin(bad["stage"])]["unit"]
    where = "RUN_DIR" if run.directory is None else run.directory.shown
    logs = [shlex.join(["raypipe", "logs", where, unit])
            for unit in list(dict.fromkeys(map(str, units)))[:_MOST_UNITS]]  # fmt: skip
    if lines := [*logs, *filter(None, [run.command])]:
        yield Code("\n".join(lines))


def _undirected(run: RunResults) -> Iterator[Part]:
    """Yield how to say which returned number is better, for a function of which nothing says so."""
    calls = next((results for results in run.results if results.table.open), None)
    if run.calls is None or calls is None or any(c.better for c in calls.table.columns):
        return
    names = [each.name for each in calls.shape.numbers if each not in calls.table.columns]
    if not names:
        return
    known = next((name for name in names if better_by_name(name)), names[0])
    option = "minimize" if better_by_name(known) == "lower" else "maximize"
    form = {
        "raypipe map": f"--{option} {known}",
        "raypipe run": f"'{option}=[{known}]'",
    }.get(" ".join(run.command.split()[:2]), f"{option}='{known}'")  # of Python
    yield "Say which number is better; stored calls are not computed again. Add to the command:"
    yield Code(form)


def _overfitted(run: RunResults) -> Iterator[Part]:
    """Yield the key that keeps the best model, for a held-out metric that ends worse."""
    first = {each.trial: each for each in reversed(run.evaluations)}
    worse = [each for each in first.values() if each.ends_worse and not each.chosen]
    for each in worse[:1]:
        metric = each.column.name.removeprefix(PREFIX)
        mode = "max" if each.column.better == "higher" else "min"
        yield (
            f"{each.trial}: the {each.name} was best at step {each.steps[each.best]:.0f} "
            f"({number(float(each.values[each.best]))}) and is worse at the end "
            f"({number(float(each.values[-1]))}). Keep the best model and stop early, with:"
        )
        monitor = f"{{metric: {metric}, mode: {mode}, patience: 3}}"
        yield Code(shlex.quote(f"{each.stage}.training.monitor={monitor}"))


def _repeat(run: RunResults) -> Iterator[Part]:
    """Yield more seeds where a point has one run, or too few to tell the best from others.

    The experiment's own tests, and a race, say for themselves how many are needed. No number of
    seeds tells equal values apart.
    """
    if "seed:" not in run.configuration or run.tested or rows(run.tables, "race") is not None:
        return
    needed = seeds_needed(run.tables)
    repeated = [best for best in run.headlines if best.runs > 1]
    if not repeated:
        equal = any(best.ties > 1 for best in run.headlines[:1])
        lost = any(best.baseline and best.baseline.gain <= 0 for best in run.headlines)
        if (run.headlines or run.evaluations) and not equal and not lost:
            yield f"Repeat with {needed} seeds to find out what is chance, with:"
            yield Code(_more_seeds(run, needed) or f"--matrix runs={needed}")
        return
    best = repeated[0]
    more = needed if best.runs < needed else 2 * best.runs
    option = _more_seeds(run, more) or (best.repeats and f"{best.repeats}={more}")
    for rival in (best.baseline, best.second if best.ties == 1 else None):
        if rival is not None and rival.may_be_chance and rival.half > 0:
            text = f"{best.runs} repetitions cannot tell {best.leaders} from {rival.label} by "
            yield f"{text}{best.name}: take {more}{', with:' if option else '.'}"
            yield from [Code(option)] if option else []
            return


def _more_seeds(run: RunResults, count: int) -> str:
    """Return what to add to the command for so many seeds in the same run; empty if unknown.

    It is for a matrix, or the calls of a function that has an argument ``seed``.
    """
    keys, calls = [key for key in run.varied if is_seed(key)], run.tables.get("calls")
    if keys == [SEED]:
        return f"--matrix runs={count}"
    if len(keys) == 1:
        key, given, form = keys[0], run.varied[keys[0]], "--matrix '{}={}'"
    elif calls is not None and SEED in calls and not keys:
        key, given, form = SEED, list(calls[SEED].dropna().unique()), "'{}={}'"
    else:
        return ""
    numbers = pd.to_numeric(pd.Series(given), errors="coerce")
    if numbers.empty or not (numbers % 1 == 0).all():
        return ""
    known = sorted(map(int, numbers))
    known += range(known[-1] + 1, known[-1] + 1 + max(0, count - len(known)))
    return form.format(key, known)


def _apply(run: RunResults) -> Iterator[Part]:
    """Yield how to train with what a sweep recommends, unless the run does."""
    for sweep in run.sweeps:
        stage = run.settings.get(sweep.stage) or {}
        if sweep.chosen and not stage.get("from_sweep"):
            yield f"Train {sweep.stage} with the recommended settings, which the section Sweep has."
            return
