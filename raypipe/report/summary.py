"""The first screen: four boxes of at most three sentences, each made by one rule."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from numbers import Integral

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed
from raypipe.hardware import bytes_text
from raypipe.report.best import Headline, Rival
from raypipe.report.formatting import (
    cell,
    counted,
    heading,
    number,
    with_interval,
    with_unit,
)
from raypipe.report.headlines import RunResults
from raypipe.report.measures import PREFIX, better_by_name
from raypipe.report.plots import rows
from raypipe.report.sections import Answers, Code, Part, Section, Tile, Tiles
from raypipe.report.studies import seeds_needed, sweep_asked, sweep_certainty
from raypipe.report.tables import range_tiles, tile
from raypipe.report.trainings import SWEEP, EvaluationCurve
from raypipe.report.variants import seeds_of
from raypipe.stats import ranked

_MOST_TILES = 6
_MOST_KEYS = 12
_MOST_COLUMNS = 3  # with results that are not finite that are named
_MOST_SENTENCES = 3  # of an answer
_MOST_UNITS = 3
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")  # between two sentences


def summary_section(about: RunResults) -> Section:
    """Return the summary of a run, from its declared tables only; empty if no stage is recorded."""
    if rows(about.tables, "stages") is None:
        return Section("Summary", [])
    command: list[Part] = [Code(about.asked_command)] if about.asked_command else []
    answers: dict[str, list[Part]] = {
        "What was asked": [" ".join(asked(about)), *command],
        "What came out": came_out(about),
        "How certain": [*certainty(about)],
        "What to do next": next_step(about),
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


def asked(about: RunResults) -> Iterator[str]:
    """Yield what the experiment does, what was varied, and what is done on which hardware."""
    sentence = _SENTENCE.split(about.declared.sentence, maxsplit=1)[0]
    if sentence and not about.only_swept:
        yield sentence if sentence.endswith(".") else f"{sentence}."
    if varied := "; ".join([*_varied(about), *sweep_asked(about.sweeps)]):
        yield f"{varied[0].upper()}{varied[1:]}."
    stages = about.tables["stages"]
    done, total, what = int((stages["status"] == "succeeded").sum()), len(stages), "stage"
    if about.calls is not None:
        done, total, what = about.calls.done, about.calls.total, "call"
    if total:
        yield f"{done} of {counted(total, what)} succeeded{_hardware(about)}."


def _varied(about: RunResults) -> Iterator[str]:
    """Yield the varied keys of the matrix, else the axes of the tables with a best result."""
    counts = {k: (len(v), 0) for k, v in about.varied.items() if len(v) > 1 and not is_seed(k)}
    seeds, word = seeds_of(about.tables), "Varied"
    if not counts and seeds < 2:
        word, seeds = "Compared", max((best.runs for best in about.headlines), default=1)
        for results in (each for each in about.results if each.headlines or each.table.open):
            if not about.headlines:
                seeds = max([seeds, *(results.rows[n].nunique() for n in results.shape.seeds)])
            for axis in results.shape.axes:
                own, every = (
                    part[axis].nunique(dropna=False) for part in (results.own, results.rows)
                )
                if own > max(1, *counts.get(heading(axis), (1, 0))):
                    counts[heading(axis)] = (own, every - own)
    keys = [
        f"{name} ({own} values" + (f", {counted(rest, 'baseline')})" if rest else ")")
        for name, (own, rest) in counts.items()
    ]
    keys = keys if len(keys) <= _MOST_KEYS else [f"{len(keys)} keys"]
    if named := [*keys, *([f"{seeds} seeds"] * (seeds > 1))]:
        yield f"{word}: {', '.join(named)}"


def _hardware(about: RunResults) -> str:
    """Return the nodes of the last command, as the end of a sentence."""
    nodes = about.nodes.reindex(columns=["gpus", "cpus", "memory_bytes"])
    if nodes.empty:
        return ""
    parts = [", ".join(dict.fromkeys(nodes["gpus"].dropna())) or "no GPU"]
    if cpus := float(nodes["cpus"].sum()):
        parts.append(f"{cpus:.0f} CPUs")
    if memory := float(nodes["memory_bytes"].sum()):
        parts.append(f"{bytes_text(memory)} of memory")
    return f" on {counted(len(nodes), 'node')} ({', '.join(parts)})"


def came_out(about: RunResults) -> list[Part]:
    """Return the experiment's findings, the headline numbers, and results that are not finite."""
    parts: list[Part] = [part for section in about.sections for part in section.findings]
    if shown := summary_tiles(about):
        parts.append(Tiles(shown))
    elif about.only_swept:
        parts.append("The sweep recommends no trial.")
    if texts := about.not_finite:
        more = len(texts) - _MOST_COLUMNS
        named = [text.rstrip(".") for text in texts[:_MOST_COLUMNS]]
        parts.append("; ".join([*named, *[f"{more} more are not"] * (more > 0)]) + ".")
    if not parts and about.declared.core is not None:
        parts.append("No table has a number.")
    return parts


def summary_tiles(about: RunResults) -> list[Tile]:
    """Return the headline numbers of tables and trainings."""
    tiles = [tile(best) for best in [*about.headlines, *about.recommended]]
    training = list(training_tiles(about))
    if not tiles and not training:
        tiles = [each for results in about.results for each in range_tiles(results)]
    return [*tiles[: max(1, _MOST_TILES - len(training))], *training][: _MOST_TILES + 2]


def training_tiles(about: RunResults) -> Iterator[Tile]:
    """Yield the held-out value of each stage's model, or the training losses without evaluations.

    A number that the headline numbers have already is left out.
    """
    by_stage: dict[str, list[EvaluationCurve]] = {}
    for each in about.evaluations:
        if each.column.better:
            by_stage.setdefault(each.stage, []).append(each)
    for stage, found in by_stage.items():
        best = about.training_headlines.get(stage)  # a mean over seeds
        if best is None:
            yield from _held_out(about, [e for e in found if e.column == found[0].column])
        elif not any(_is_named(about, best.column.name, best.mean)):
            yield tile(best)
    trials = rows(about.tables, "trials")
    if by_stage or about.headlines or trials is None or "loss_final" not in trials:
        return
    for name, group in trials[trials["stage"] != SWEEP].groupby("stage", sort=False):
        losses = group["loss_final"].astype(float)
        if np.isfinite(losses).any():
            yield Tile("training loss", number(float(losses.min())), str(name))


def _is_named(about: RunResults, column: str, value: float) -> Iterator[bool]:
    """Yield whether each headline number is this one of the same metric."""
    for best in about.headlines:
        same = best.column.name.removeprefix(PREFIX) == column.removeprefix(PREFIX)
        yield same and number(best.mean) == number(value)


def _held_out(about: RunResults, found: Sequence[EvaluationCurve]) -> Iterator[Tile]:
    """Yield the best model of a stage by its held-out metric.

    A model is that of the best step if held-out data chose it, else that of the last step.
    """
    kept = []
    for each in found:
        step, _ = about.chosen_steps.get(each.trial, (None, False))
        steps = list(each.steps)
        kept.append(steps.index(step) if step in steps else len(steps) - 1)
    ends = [float(each.values[at]) for each, at in zip(found, kept, strict=True)]
    column = found[0].column
    order, _ = ranked(ends, range(len(ends)), [0] * len(ends), column.better)
    best, at = found[order[0]], kept[order[0]]
    value, last, top = ends[order[0]], float(best.values[-1]), float(best.values[best.best])
    is_last = at == len(best.steps) - 1
    if is_last and top == last and any(_is_named(about, column.name, last)):
        return
    note = f"{best.stage}, at the end"
    if not is_last:
        note = (
            f"{best.stage}, best of {len(best.steps)} evaluations, at step {best.steps[at]:.0f}; "
        )
        note += f"{number(last)} at the end"
        if about.chosen_steps[best.trial][1]:
            note += f", where it stopped early ({best.steps[-1]:.0f})"
    elif top != last:
        note += f"; {number(top)} at step {best.steps[best.best]:.0f}"
    if np.isfinite(rival := float(best.baseline_values[at])):
        note += f"; {best.baseline} {number(rival)}"
    bad = (is_last and best.ends_worse) or not best.beats_baseline(at)
    label = with_unit(best.name, column.name, column.unit, column.better)
    yield Tile(label, number(value), note, "warn" if bad else "")


def certainty(about: RunResults) -> Iterator[str]:
    """Yield what the run's tests say: the experiment's own, else the intervals over repetitions."""
    repeated = [best for best in about.headlines if best.runs > 1]
    if repeated:
        least, most = min(b.runs for b in repeated), max(b.runs for b in repeated)
        count = str(most) if least == most else f"{least} to {most}"
        yield f"Means of {count} repetitions; ± is Student's 95 % confidence interval."
    elif (about.headlines or about.evaluations) and not about.tested:
        several = any(len(best.points) > 1 for best in about.headlines)
        yield f"One run{' of each' if several else ''}, no interval over seeds."
    if about.tested:
        yield from about.tested
    elif repeated:
        best = repeated[0]
        if best.baseline is not None and best.baseline.is_tested:
            yield _against(best, f"the baseline {best.baseline.label}", best.baseline)
        if best.ties == 1 and best.second is not None and best.second.is_tested:
            value = cell(best.column.name, best.second.mean)
            yield _against(best, f"the second best, {best.second.label} ({value})", best.second)
    if about.only_swept:
        yield from sweep_certainty(about.sweeps)


def _against(best: Headline, name: str, rival: Rival) -> str:
    """Return on which side of a rival the best point is, and whether that may be chance."""
    column, metric = best.column, f"{best.name[:1].upper()}{best.name[1:]}"
    size = abs(rival.gain)
    if size == rival.half == 0:
        return f"{metric} is that of {name} in every repetition."
    text = with_interval(column.name, size, rival.half)
    if rival.half == 0:
        text = f"{cell(column.name, size)} (in every repetition)"
    side = "above" if (rival.gain > 0) == (column.better == "higher") else "below"
    judged = "it may be chance" if rival.may_be_chance else "more than chance"
    return f"{metric} is {text} {side} {name}: {judged}."


def next_step(about: RunResults) -> list[Part]:
    """Return the first of the next steps that applies, with what to type."""
    advised = [] if about.varied else [each.advice for each in about.sections if each.advice]
    steps = (_failed, _undirected, lambda _: next(iter(advised), ()), _overfitted, _repeat, _apply)
    found = (list(step(about)) for step in steps)
    return next(filter(None, found), ["The tables suggest no next step."])


def _failed(about: RunResults) -> Iterator[Part]:
    """Yield how to see the errors of what failed in the end, and how to continue."""
    stages = about.tables["stages"]
    bad = stages[stages["status"].isin(["failed", "out_of_memory"])]
    count, what = len(stages) - int((stages["status"] == "succeeded").sum()), "stage"
    count = len(bad) if len(bad) else count
    if not count:
        return
    if about.calls is not None and about.calls.done < about.calls.total:
        count, what = about.calls.total - about.calls.done, "call"
    if bad.empty:
        yield f"{counted(count, what)} not done. Continue:"
    else:
        yield f"{counted(count, what)} failed. Read the error, then continue:"
    failures = about.tables.get("failures", pd.DataFrame({"stage": [], "unit": []}))
    units = failures[failures["stage"].isin(bad["stage"])]["unit"]
    where = "RUN_DIR" if about.directory is None else about.directory.shown
    logs = [shlex.join(["raypipe", "logs", where, unit])
            for unit in list(dict.fromkeys(map(str, units)))[:_MOST_UNITS]]  # fmt: skip
    if lines := [*logs, *filter(None, [about.command])]:
        yield Code("\n".join(lines))


def _undirected(about: RunResults) -> Iterator[Part]:
    """Yield how to say which returned number is better, for a function of which nothing says so."""
    calls = next((results for results in about.results if results.table.open), None)
    if about.calls is None or calls is None or any(c.better for c in calls.table.columns):
        return
    names = [each.name for each in calls.shape.numbers if each not in calls.table.columns]
    if not names:
        return
    known = next((name for name in names if better_by_name(name)), names[0])
    option = "minimize" if better_by_name(known) == "lower" else "maximize"
    form = f"{option}='{known}'"  # of Python
    if about.command.startswith("raypipe "):
        is_map = about.command.startswith("raypipe map ")
        form = f"--{option} {known}" if is_map else f"'{option}=[{known}]'"
    yield "Say which number is better; stored calls are not computed again. Add to the command:"
    yield Code(form)


def _overfitted(about: RunResults) -> Iterator[Part]:
    """Yield the key that keeps the best model, for a held-out metric that ends worse."""
    first = {each.trial: each for each in reversed(about.evaluations)}
    for each in first.values():
        if each.ends_worse and each.trial not in about.chosen_steps:
            metric = each.column.name.removeprefix(PREFIX)
            mode = "max" if each.column.better == "higher" else "min"
            yield (
                f"{each.trial}: the {each.name} was best at step {each.steps[each.best]:.0f} "
                f"({number(float(each.values[each.best]))}) and is worse at the end "
                f"({number(float(each.values[-1]))}). Keep the best model and stop early, with:"
            )
            monitor = f"{{metric: {metric}, mode: {mode}, patience: 3}}"
            yield Code(shlex.quote(f"{each.stage}.training.monitor={monitor}"))
            return


def _repeat(about: RunResults) -> Iterator[Part]:
    """Yield more seeds where a point has one run, or too few to tell the best from others.

    The experiment's own tests, and a race, say for themselves how many are needed. No number of
    seeds tells equal values apart.
    """
    if "seed:" not in about.configuration or about.tested or rows(about.tables, "race") is not None:
        return
    needed = seeds_needed(about.tables)
    repeated = [best for best in about.headlines if best.runs > 1]
    if not repeated:
        equal = any(best.ties > 1 for best in about.headlines[:1])
        lost = any(best.baseline and best.baseline.gain <= 0 for best in about.headlines)
        if (about.headlines or about.evaluations) and not equal and not lost:
            yield f"Repeat with {needed} seeds to find out what is chance, with:"
            yield Code(_more_seeds(about, needed) or f"--matrix runs={needed}")
        return
    best = repeated[0]
    rivals = [best.baseline, best.second if best.ties == 1 else None]
    for rival in rivals:
        if rival is not None and rival.may_be_chance and rival.half > 0:
            more = needed if best.runs < needed else 2 * best.runs
            text = f"{best.runs} repetitions cannot tell {best.leaders} from {rival.label} by "
            option = _more_seeds(about, more)
            if not option and best.repeats:
                option = f"{best.repeats}={more}"
            yield f"{text}{best.name}: take {more}{', with:' if option else '.'}"
            if option:
                yield Code(option)
            return


def _more_seeds(about: RunResults, count: int) -> str:
    """Return what to add to the command for so many seeds in the same run; empty if unknown.

    It is for a matrix, or the calls of a function that has an argument ``seed``.
    """
    keys = [key for key in about.varied if is_seed(key)]
    calls = about.tables.get("calls")
    if keys == [SEED]:
        return f"--matrix runs={count}"
    if len(keys) == 1:
        listed = (about.setting("matrix.axes") or {}).get(keys[0])
        form = "--matrix '{}={}'"
    elif calls is not None and SEED in calls and not keys:
        listed, form = calls[SEED].dropna().unique().tolist(), "'{}={}'"
        keys = [SEED]
    else:
        return ""
    if not listed or not all(isinstance(seed, Integral) for seed in listed):
        return ""
    known = sorted(int(seed) for seed in listed)
    known += range(known[-1] + 1, known[-1] + 1 + max(0, count - len(known)))
    return form.format(keys[0], known)


def _apply(about: RunResults) -> Iterator[Part]:
    """Yield how to train with what a sweep recommends, unless the run does."""
    for sweep in about.sweeps:
        if sweep.chosen and not about.setting(f"{sweep.stage}.from_sweep"):
            yield f"Train {sweep.stage} with the recommended settings, which the section Sweep has."
            return
