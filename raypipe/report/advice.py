"""Advice on the next command, from what the tables of a run show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from numbers import Integral, Real

import numpy as np

from raypipe.config.edges import Edge, edge_of_values, possible
from raypipe.config.yaml_text import dump_yaml
from raypipe.report.about import About
from raypipe.report.evaluations import EvaluationCurve
from raypipe.report.formatting import heading, number
from raypipe.report.headlines import Headline
from raypipe.report.measures import PREFIX, better_by_name
from raypipe.report.next_command import (
    elsewhere,
    more_seeds,
    run_dir_of,
    with_values,
    words_of,
)
from raypipe.report.plots import rows
from raypipe.report.sections import Code, Part
from raypipe.report.sweep_summary import recommended_settings
from raypipe.report.table_shape import as_numbers, is_number, value_label
from raypipe.report.variants import seeds_needed

_MOST_UNITS = 3
_LEAST_VALUES = 3  # of an axis, for its edges to say anything


def advice(about: About) -> list[Part]:
    """Return the first of the next steps that applies, with its command."""
    steps = (failed, undirected, noted, overfitted, unfinished, edges, repeat, apply_sweep)
    found = (list(step(about)) for step in steps)
    return next(filter(None, found), ["The tables suggest no next step."])


def failed(about: About) -> Iterator[Part]:
    """Yield how to see the errors of stages that failed in the end, and how to continue."""
    stages = about.tables["stages"]
    bad = stages[stages["status"].isin(["failed", "out_of_memory"])]
    stopped = stages[stages["status"].isin(["interrupted", "skipped"])]
    what, count = "stage", len(stopped) if bad.empty else len(bad)
    if count and about.calls is not None and about.calls.missing:
        what, count = "call", about.calls.missing
    if bad.empty:
        if len(stopped):
            yield f"{count} {what}{'s' * (count > 1)} not done. Continue:"
            yield from _code(about.command)
        return
    failures = rows(about.tables, "failures")
    units = [] if failures is None else list(
        dict.fromkeys(failures[failures["stage"].isin(bad["stage"])]["unit"].astype(str))
    )  # fmt: skip
    yield f"{count} {what}{'s' * (count > 1)} failed. Read the error, then continue:"
    where = run_dir_of(about.command)
    lines = [shlex.join(["raypipe", "logs", where, unit]) for unit in units[:_MOST_UNITS]]
    yield from _code("\n".join([*lines, about.command]))


def undirected(about: About) -> Iterator[Part]:
    """Yield how to say which returned number is better, for a function of which nothing says so."""
    if about.calls is None or any(
        c.better for results in about.results if results.table.open for c in results.table.columns
    ):
        return
    names = [each.name for results in about.results if results.table.open
             for each in results.shape.numbers if each not in results.table.columns]  # fmt: skip
    if not names:
        return
    known = next((name for name in names if better_by_name(name)), names[0])
    option = "minimize" if better_by_name(known) == "lower" else "maximize"
    other = "maximize" if option == "minimize" else "minimize"
    words = words_of(about.command)
    form = "{}: [{}]" if words[:1] == ["raypipe"] else "{}='{}'"  # of a file, or of Python
    form = "--{} {}" if words[:2] == ["raypipe", "map"] else form
    yield (
        f"Say which number is better, such as {form.format(option, known)} "
        f"(or {form.format(other, 'NAME')}); stored calls are not computed again:"
    )
    if words[:2] == ["raypipe", "map"]:
        yield Code(with_values(about.command, options=(f"--{option}", known)))
    elif words[:1] == ["raypipe"]:
        yield Code(with_values(about.command, f"{option}=[{known}]"))


def noted(about: About) -> Iterator[Part]:
    """Yield the advice of the experiment's own sections, which show one point of a matrix."""
    if not about.varied:
        yield from next((each.advice for each in about.sections if each.advice), ())


def overfitted(about: About) -> Iterator[Part]:
    """Yield the key that keeps the best model, for a held-out metric that ends worse."""
    for evaluation in about.evaluations:
        if evaluation.trial in about.chosen_steps or not evaluation.ends_worse:
            continue
        if not _leads(about.evaluations, evaluation):
            continue
        best = evaluation.best
        metric = evaluation.metric.removeprefix(PREFIX)
        mode = "max" if evaluation.better == "higher" else "min"
        yield (
            f"{evaluation.trial}: the {evaluation.name} was best at step "
            f"{evaluation.steps[best]:.0f} ({number(float(evaluation.values[best]))}) and is worse "
            f"at the end ({number(float(evaluation.values[-1]))}). Keep the best model and stop "
            "early:"
        )
        value = (
            f"{evaluation.stage}.training.monitor={{metric: {metric}, mode: {mode}, patience: 3}}"
        )
        yield from _code(elsewhere(about.command, value))
        return


def apply_sweep(about: About) -> Iterator[Part]:
    """Yield how to train with what a sweep recommends, unless the run does."""
    for sweep in about.sweeps:
        settings = recommended_settings(about.tables, sweep)
        words = words_of(elsewhere(about.command))
        if not settings or len(words) < 3 or about.setting(f"{sweep.stage}.from_sweep"):
            continue
        yield f"Train {sweep.stage} with the recommended settings:"
        values = [f"{key}={value_label(value)}" for key, value in settings.items()]
        yield Code(shlex.join([words[0], "run", *words[2:], *values]))
        return


def _leads(found: Sequence[EvaluationCurve], evaluation: EvaluationCurve) -> bool:
    """Whether it is of the first metric of its run."""
    return next(e.metric for e in found if e.trial == evaluation.trial) == evaluation.metric


def unfinished(about: About) -> Iterator[Part]:
    """Yield a larger length for a stage that still improves on held-out data at the end."""
    for evaluation in about.evaluations:
        if not evaluation.still_improves or evaluation.memorizes:
            continue
        _, stopped = about.chosen_steps.get(evaluation.trial, (None, False))
        if stopped or not _leads(about.evaluations, evaluation):
            continue
        for name in ("steps", "epochs"):
            key = f"{evaluation.stage}.training.{name}"
            length = about.setting(key)
            if isinstance(length, int) and key not in about.varied:
                if name == "steps" and _taken(about, evaluation.trial) < length:
                    break  # the task limits them
                yield (
                    f"{evaluation.trial}: the {evaluation.name} still improves at the end. "
                    "Train longer:"
                )
                yield from _code(elsewhere(about.command, f"{key}={2 * length}"))
                return


def _taken(about: About, trial: str) -> float:
    """Return the steps that a training took; infinity if unknown."""
    trials = rows(about.tables, "trials")
    if trials is None:
        return math.inf
    steps = trials.loc[trials["trial_id"] == trial, "steps"].dropna()
    return float(steps.max()) if len(steps) else math.inf


def edges(about: About) -> Iterator[Part]:
    """Yield wider values for an axis at whose end the best point lies by more than chance."""
    if rows(about.tables, "search") is not None:
        return  # a search has ranges
    for best in about.headlines:
        if best.is_shared or best.to_runner_up.may_be_chance:
            continue
        for axis in best.values:
            found = edge(about, best, axis)
            if found is None:
                continue
            end, values = found
            side = "highest" if end.is_largest else "lowest"
            name = axis if axis in about.varied else heading(axis)
            yield (
                f"{best.name} is best at the {side} {name} that was tried, "
                f"{value_label(best.values[axis])}. Try further values:"
            )
            wider = sorted([*values, end.further[0]])
            listed = f"{axis}=[{', '.join(value_label(value) for value in wider)}]"
            if axis in about.varied:
                yield from _code(with_values(about.command, matrix=(listed,)))
            elif about.setting(f"arguments.{axis}") is not None and words_of(about.command):
                yield from _code(with_values(about.command, listed))
            else:
                yield from _code(shlex.quote(listed))
            return


def edge(about: About, best: Headline, axis: str) -> tuple[Edge, list[float]] | None:
    """Return the end of an axis at which the best point lies, and the values that were tried.

    None if it lies between others, or nothing beyond is possible.
    """
    if not is_number(best.points[axis]) or not isinstance(best.values[axis], Real):
        return None
    known = as_numbers(best.points[axis])
    values = sorted({float(value) for value in known if np.isfinite(value)})
    if len(values) < _LEAST_VALUES or not np.isfinite(best.mean):
        return None
    if all(value.is_integer() for value in values):  # the next ones are whole, too
        values = [int(value) for value in values]
    at = next((value for value in values if value == best.values[axis]), None)
    most = _largest_micro_batch(about, axis)
    found = possible(edge_of_values(values, at), lambda value: value <= most)
    return None if found is None else (found, values)


def _largest_micro_batch(about: About, axis: str) -> float:
    """Return the largest micro-batch that the effective batch of a matrix allows."""
    section, _, last = axis.rpartition(".")
    effective = about.setting("matrix.constraints.effective_batch")
    if last != "micro_batch" or not isinstance(effective, int):
        return math.inf
    workers = about.setting(f"{section.rpartition('.')[0]}.scaling.workers")
    return math.ceil(effective / (workers if isinstance(workers, int) else 1))


def repeat(about: About) -> Iterator[Part]:
    """Yield more seeds where a point has one run, or too few to tell the best from others.

    The experiment's own tests, and a race, say for themselves how many are needed. No number of
    seeds tells equal values apart.
    """
    if not about.seeds or not (about.headlines or about.evaluations):
        return
    if about.tested or rows(about.tables, "race") is not None:
        return
    if (about.tables["stages"]["status"] != "succeeded").any():
        return  # of more use once the run is complete
    repeated = [best for best in about.headlines if best.runs > 1]
    if not repeated and (about.losing or any(best.is_shared for best in about.headlines[:1])):
        return  # more seeds of it are of no use
    needed = seeds_needed(about.tables)
    if not repeated:
        command = more_seeds(about, needed)
        if not command and (other := elsewhere(about.command)):
            command = with_values(other, matrix=(f"runs={needed}",))
        yield f"Repeat with {needed} seeds to find out what is chance:"
        yield from _code(command)
        return
    best = repeated[0]
    rivals = {best.baseline: best.to_baseline, best.runner_up: best.to_runner_up}
    close = [
        name
        for name, each in rivals.items()
        if each.may_be_chance and each.half > 0 and not (best.is_shared and name == best.runner_up)
    ]
    if not close:
        return
    name = close[0]
    more = needed if best.runs < needed else 2 * best.runs
    command = more_seeds(about, more)
    if not command and best.repeats and about.command:
        command = with_values(about.command, f"{best.repeats}={more}")
    values = contenders(about, best) if name == best.runner_up else []
    alone = with_values(command, *values)
    few = alone != with_values(command)
    how = f", of these settings alone or of all {len(best.points)}:" if few else "."
    yield (
        f"{best.runs} repetitions cannot tell {best.leaders} from {name} by {best.name}: "
        f"take {more}{how}"
    )
    if few:
        yield Code(alone)
    yield from _code(command)


def contenders(about: About, best: Headline) -> list[str]:
    """Return ``NAME=[VALUE, ...]`` of the arguments of a function at its two best settings.

    Empty if these are most of the settings, or the axes are not arguments.
    """
    listed = {
        axis: [_given(about, axis, value) for value in (best.values[axis], other)]
        for axis, other in best.runner_up_values.items()
    }
    if not listed or any(None in values for values in listed.values()):
        return []
    texts = {axis: list(dict.fromkeys(map(str, values))) for axis, values in listed.items()}
    if 2 * math.prod(map(len, texts.values())) > len(best.points):
        return []
    return [f"{axis}=[{', '.join(values)}]" for axis, values in texts.items()]


def _given(about: About, axis: str, value: object) -> str | None:
    """Return a value of an argument as YAML that means it, as it was given; None if it was not."""
    given = about.setting(f"arguments.{axis}")
    if isinstance(given, str) and isinstance(value, Integral):  # of a range
        return str(int(value))
    items = given if isinstance(given, list) else []
    found = [item for item in items if item == value and item is not None]
    text = dump_yaml(found[:1], default_flow_style=True, width=math.inf)
    return text.strip()[1:-1] if found else None


def _code(text: str) -> Iterator[Part]:
    if text.strip():
        yield Code(text.strip())
