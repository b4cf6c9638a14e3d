"""Advice on the next command, from what the tables of a run show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from numbers import Real

import numpy as np

from raypipe.config.matrix import SEED
from raypipe.report.about import About
from raypipe.report.evaluations import PREFIX, Evaluation, warning
from raypipe.report.formatting import heading
from raypipe.report.headlines import Headline
from raypipe.report.plots import rows
from raypipe.report.sections import Code, Part
from raypipe.report.sweep_summary import recommended_settings
from raypipe.report.table_shape import as_numbers, is_number, value_label
from raypipe.stats import runs_needed

_MOST_UNITS = 3
_LEAST_VALUES = 3  # of an axis, for its edges to say anything
_RUNS = 5


def advice(about: About) -> list[Part]:
    """Return what to do next, each with the command; that nothing stands out if nothing does."""
    found = [
        part
        for find in (failed, overfitted, unfinished, edges, noted, repeat, apply_sweep)
        for part in find(about)
    ]
    return found or ["Nothing stands out in the tables."]


def failed(about: About) -> Iterator[Part]:
    """Yield how to see the errors of stages that failed in the end, and how to continue."""
    stages = about.tables["stages"]
    bad = stages[stages["status"].isin(["failed", "out_of_memory"])]
    stopped = stages[stages["status"].isin(["interrupted", "skipped"])]
    if bad.empty:
        if len(stopped):
            yield f"{len(stopped)} stage{'s' * (len(stopped) > 1)} not done. Continue:"
            yield from _code(about.command)
        return
    failures = rows(about.tables, "failures", ["stage", "unit"])
    units = [] if failures is None else list(
        dict.fromkeys(failures[failures["stage"].isin(bad["stage"])]["unit"].astype(str))
    )  # fmt: skip
    yield f"{len(bad)} stage{'s' * (len(bad) > 1)} failed. Read the error, then continue:"
    where = _run_dir(about.command)
    lines = [shlex.join(["raypipe", "logs", where, unit]) for unit in units[:_MOST_UNITS]]
    yield from _code("\n".join([*lines, about.command]))


def overfitted(about: About) -> Iterator[Part]:
    """Yield the key that keeps the best model, for stages whose held-out metric ends worse."""
    shown: set[str] = set()
    for evaluation in about.evaluations:
        key = f"{evaluation.stage}.training.monitor"
        if not evaluation.ends_worse or evaluation.stage in shown or about.setting(key):
            continue
        if not _leads(about.evaluations, evaluation):
            continue
        shown.add(evaluation.stage)
        metric = evaluation.metric.removeprefix(PREFIX)
        mode = "max" if evaluation.better == "higher" else "min"
        yield f"{warning(evaluation)} Keep the best model and stop early:"
        value = f"{{metric: {metric}, mode: {mode}, patience: 3}}"
        yield from _code(_elsewhere(about.command, f"{key}={value}"))


def apply_sweep(about: About) -> Iterator[Part]:
    """Yield how to train with what a sweep recommends, unless the run does."""
    for sweep in about.sweeps:
        settings = recommended_settings(about.tables, sweep)
        words = _words(_elsewhere(about.command))
        if not settings or len(words) < 3 or about.setting(f"{sweep.stage}.from_sweep"):
            continue
        yield f"Train {sweep.stage} with the recommended settings:"
        values = [f"{key}={value_label(value)}" for key, value in settings.items()]
        yield Code(shlex.join([words[0], "run", *words[2:], *values]))


def noted(about: About) -> Iterator[Part]:
    """Yield the advice of the experiment's own sections."""
    for section in about.sections:
        yield from section.advice


def _leads(found: Sequence[Evaluation], evaluation: Evaluation) -> bool:
    """Whether it is of the first metric of its run."""
    return next(e.metric for e in found if e.trial == evaluation.trial) == evaluation.metric


def unfinished(about: About) -> Iterator[Part]:
    """Yield a larger length for stages that still improve at the end, or lose to a baseline."""
    shown: set[str] = set()
    for evaluation in about.evaluations:
        loses = bool(about.losing) and not evaluation.ends_worse
        if evaluation.stage in shown or not (evaluation.still_improves or loses):
            continue
        if not _leads(about.evaluations, evaluation):
            continue
        shown.add(evaluation.stage)
        for name in ("steps", "epochs"):
            key = f"{evaluation.stage}.training.{name}"
            length = about.setting(key)
            if isinstance(length, int) and key not in about.varied:
                why = f"the {evaluation.name} still improves at the end"
                if not evaluation.still_improves:
                    done = f"{length} {name if length != 1 else name[:-1]}"
                    why = f"after {done} the model does not beat the baseline"
                yield f"{evaluation.trial}: {why}. Train longer:"
                factor = 2 if evaluation.still_improves else 4
                yield from _code(_elsewhere(about.command, f"{key}={factor * length}"))
                break


def edges(about: About) -> Iterator[Part]:
    """Yield wider values for axes at whose end the best point lies."""
    shown: set[str] = set()
    if rows(about.tables, "search", []) is not None:
        return  # a search has ranges, and its own section
    for best in about.headlines:
        for axis in best.values:
            found = edge(best, axis)
            if found is None or axis in shown:
                continue
            shown.add(axis)
            side, further, values = found
            name = axis if axis in about.varied else heading(axis)
            yield (
                f"{best.name} is best at the {side} {name} that was tried, "
                f"{value_label(best.values[axis])}. Try further values:"
            )
            wider = sorted([*values, further])
            listed = f"{axis}=[{', '.join(value_label(value) for value in wider)}]"
            if axis in about.varied:
                yield from _code(f"{about.command} --matrix {shlex.quote(listed)}")
            else:
                yield from _code(shlex.quote(listed))


def edge(best: Headline, axis: str) -> tuple[str, float, list[float]] | None:
    """Return ``lowest`` or ``highest``, a value beyond it, and the values, if it is at an end."""
    if not is_number(best.points[axis]) or not isinstance(best.values[axis], Real):
        return None
    known = as_numbers(best.points[axis])
    values = sorted({float(value) for value in known if np.isfinite(value)})
    if len(values) < _LEAST_VALUES or not np.isfinite(best.mean):
        return None
    place = float(best.values[axis])
    if place == values[-1]:
        return "highest", beyond(values[-2], values[-1]), values
    if place == values[0]:
        return "lowest", beyond(values[1], values[0]), values
    return None


def beyond(inner: float, outer: float) -> float:
    """Return the value that continues two: by their ratio if it is 1.5 or more, or by their step.

    A positive value does not become negative or zero.
    """
    if min(inner, outer) > 0:
        ratio = outer / inner
        step = 2 * outer - inner
        if max(ratio, 1 / ratio) < 1.5 and step > 0:
            return float(f"{step:.6g}")
        further = outer * ratio
        whole = float(inner).is_integer() and float(outer).is_integer()
        if whole and further < outer:
            return float(max(1, math.floor(further)))
        return float(round(further)) if whole else float(f"{further:.4g}")
    return float(f"{2 * outer - inner:.6g}")


def repeat(about: About) -> Iterator[Part]:
    """Yield more seeds where a point has one run, or too few to tell the best from others."""
    if not about.seeds or not (about.headlines or about.evaluations):
        return
    if (about.tables["stages"]["status"] != "succeeded").any():
        return  # of more use once the run is complete
    repeated = [best for best in about.headlines if best.runs > 1]
    if not repeated and about.losing:
        return  # more seeds of it are of no use
    if not repeated:
        command = about.command if SEED in about.varied else _elsewhere(about.command)
        yield "Repeat with five seeds to find out what is chance:"
        yield from _code(f"{command} --matrix runs={_RUNS}" if command else "")
        return
    best = repeated[0]
    rivals = {best.baseline: best.to_baseline, best.runner_up: best.to_runner_up}
    close = [name for name, difference in rivals.items() if difference.may_be_chance]
    if not close or (best.is_shared and close == [best.runner_up]):
        return
    more = max(2 * best.runs, runs_needed(1))
    name = next(name for name in close if not (best.is_shared and name == best.runner_up))
    yield (
        f"{best.runs} repetitions cannot tell {best.leaders} from {name} by {best.name}: "
        f"take {more}."
    )
    if SEED in about.varied:
        yield from _code(f"{about.command} --matrix runs={more}")
    elif best.repeats and about.command:
        yield from _code(f"{about.command} {best.repeats}={more}")


def _code(text: str) -> Iterator[Part]:
    if text.strip():
        yield Code(text.strip())


def _elsewhere(command: str, *overrides: str) -> str:
    """Return the command in a new run directory, with further overrides."""
    words = _words(command)
    if "--run-dir" in words:
        place = words.index("--run-dir")
        words = [*words[:place], *words[place + 2 :]]
    return shlex.join([*words, *overrides]) if words else ""


def _run_dir(command: str) -> str:
    words = _words(command)
    place = words.index("--run-dir") + 1 if "--run-dir" in words else len(words)
    return words[place] if place < len(words) else "RUN_DIR"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()
