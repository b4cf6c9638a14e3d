"""The first screen: what was asked, what came out, how certain it is, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from raypipe.config.matrix import is_seed
from raypipe.hardware import bytes_text
from raypipe.report.about import About, Results
from raypipe.report.advice import advice
from raypipe.report.comparison import seeds_of
from raypipe.report.evaluations import EvaluationCurve
from raypipe.report.formatting import cell, heading, number, plus_minus
from raypipe.report.headlines import Difference, Headline, range_tiles, tile
from raypipe.report.measures import PREFIX
from raypipe.report.plots import rows
from raypipe.report.sections import Answers, Code, Part, Section, Tile, Tiles
from raypipe.report.sweep_summary import sweep_asked, sweep_certainty, sweep_tiles
from raypipe.report.sweep_trials import SWEEP
from raypipe.stats import ranked

_MOST_TILES = 6
_LONGEST = 120  # characters of the list of varied keys
_MOST_COLUMNS = 3  # with results that are not finite that are named
_MOST_SENTENCES = 3  # of an answer
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")  # between two sentences


def summary_section(about: About) -> Section:
    """Return the summary of a run, from its declared tables only; empty if no stage is recorded."""
    if rows(about.tables, "stages") is None:
        return Section("Summary", [])
    return Section(
        "Summary",
        [
            Answers(
                [
                    (question, short(parts))
                    for question, parts in (
                        ("What was asked", [" ".join(asked(about)), *_command(about)]),
                        ("What came out", came_out(about)),
                        ("How certain", list(certainty(about))),
                        ("What to do next", advice(about)),
                    )
                ]
            )
        ],
    )


def short(parts: Sequence[Part]) -> list[Part]:
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


def asked(about: About) -> Iterator[str]:
    """Yield what the experiment does, what was varied, and what is done on which hardware."""
    sentence = _SENTENCE.split(about.declared.sentence, maxsplit=1)[0]
    if sentence and not about.only_swept:
        yield sentence if sentence.endswith(".") else f"{sentence}."
    if varied := "; ".join(filter(None, [_varied(about), *sweep_asked(about.sweeps)])):
        yield f"{varied[0].upper()}{varied[1:]}."
    hardware = _hardware(about.tables.get("environment"))
    stages = about.tables["stages"]
    done, total, what = int((stages["status"] == "succeeded").sum()), len(stages), "stage"
    if about.calls is not None:
        done, total, what = about.calls.done, about.calls.total, "call"
    if total:
        yield f"{done} of {total} {what}{'s' * (total > 1)} succeeded{hardware}."


def _command(about: About) -> Iterator[Part]:
    if about.asked_command:
        yield Code(about.asked_command)


def _varied(about: About) -> str:
    keys = {key: len(values) for key, values in about.varied.items() if len(values) > 1}
    seeds = seeds_of(about.tables)
    keys = {key: count for key, count in keys.items() if not is_seed(key)}
    baselines: dict[str, int] = {}
    if not keys and seeds < 2:
        compared = [each for each in about.results if each.headlines or each.table.open]
        counts: dict[str, int] = {}
        for results in compared:
            for name in results.shape.axes:
                found = _most_values(results, results.own, name)
                if found >= counts.get(heading(name), 0):
                    counts[heading(name)] = found
                    every = _most_values(results, results.rows, name)
                    baselines[heading(name)] = every - found
        keys = {name: count for name, count in counts.items() if count > 1}
        listed = [
            results.rows[name].nunique() for results in compared for name in results.shape.seeds
        ]
        seeds = max((best.runs for best in about.headlines), default=max(listed, default=1))
        word = "Compared"
    else:
        word = "Varied"
    named = [f"{key} ({count} values{_with(baselines.get(key, 0))})" for key, count in keys.items()]
    if seeds > 1:
        named.append(f"{seeds} seeds")
    text = ", ".join(named)
    if not text:
        return ""
    return f"{word}: {text if len(text) <= 4 * _LONGEST else f'{len(keys)} keys'}"


def _with(baselines: int) -> str:
    return f", {baselines} baseline{'s' * (baselines > 1)}" if baselines else ""


def _most_values(results: Results, rows: pd.DataFrame, axis: str) -> int:
    """Return how many values of an axis are compared with each other in some rows of the table."""
    groups = list(results.shape.groups)
    if not groups:
        return int(rows[axis].nunique(dropna=False))
    counts = rows.groupby(groups, dropna=False)[axis].nunique()
    return int(counts.max()) if len(counts) else 0


def _hardware(environment: pd.DataFrame | None) -> str:
    """Return the nodes of the last command, as the end of a sentence."""
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
        parts.append(f"{bytes_text(float(nodes['memory_bytes'].sum()))} of memory")
    count = len(nodes)
    return f" on {count} node{'s' * (count > 1)} ({', '.join(parts)})"


def summary_tiles(about: About) -> list[Tile]:
    """Return the headline numbers of tables and trainings."""
    tiles = [tile(best) for best in about.headlines] + sweep_tiles(about.sweeps)
    training = list(training_tiles(about))
    if not tiles and not training:
        for results in about.results:
            tiles += range_tiles(results.rows, results.shape)
    return [*tiles[: max(1, _MOST_TILES - len(training))], *training][: _MOST_TILES + 2]


def came_out(about: About) -> list[Part]:
    """Return the experiment's findings, the headline numbers, and results that are not finite."""
    parts: list[Part] = [part for section in about.sections for part in section.findings]
    if shown := summary_tiles(about):
        parts.append(Tiles(shown))
    elif about.only_swept:
        parts.append("The sweep recommends no trial.")
    if texts := about.not_finite:
        more = len(texts) - _MOST_COLUMNS
        listed = [text.rstrip(".") for text in texts[:_MOST_COLUMNS]]
        parts.append("; ".join([*listed, *[f"{more} more are not"] * (more > 0)]) + ".")
    if not parts and about.declared.core is not None:
        parts.append("No table has a number.")
    return parts


def beaten(about: About) -> list[str]:
    """Return a sentence for each result that is not better than a baseline of the same run.

    The end of a command warns of them; in the report the headline numbers have the distance.
    """
    return [*_losing(about), *_worse_than_baseline(about)]


def _losing(about: About) -> Iterator[str]:
    """Yield the numbers in which the best point is not better than the strongest baseline."""
    found: dict[tuple[str, str], list[str]] = {}
    for best in about.losing:
        subject = f"{best.leaders or 'The best row'} {'are' if best.is_shared else 'is'}"
        found.setdefault((subject, best.baseline), []).append(best.name)
    for (subject, baseline), names in found.items():
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        yield f"{subject} not better than the baseline {baseline} in {listed}."


def _worse_than_baseline(about: About) -> Iterator[str]:
    """Yield the trainings whose held-out metric is never better than its baseline."""
    seen: set[str] = set()
    for each in about.evaluations:
        rivals = each.baseline_values
        if (
            each.trial in seen
            or rivals is None
            or not each.better
            or not np.isfinite(rivals[each.best])
        ):
            continue
        best, rival = float(each.values[each.best]), float(rivals[each.best])
        if not (best < rival if each.better == "lower" else best > rival):
            seen.add(each.trial)
            yield (
                f"{each.trial} is not better than its baseline: {each.name} {number(best)}, "
                f"{each.baseline} {number(rival)}."
            )


def training_tiles(about: About) -> Iterator[Tile]:
    """Yield the held-out value of each stage's model, or the training losses without evaluations.

    The model is that of the best step if held-out data chose it, else that of the last step.
    """
    chosen = about.chosen_steps
    by_stage: dict[str, list[EvaluationCurve]] = {}
    for evaluation in about.evaluations:
        if evaluation.better:
            by_stage.setdefault(evaluation.stage, []).append(evaluation)
    for stage, found in by_stage.items():
        if (headline := about.training_headlines.get(stage)) is not None:  # a mean over seeds
            if not any(_is_same(headline, best) for best in about.headlines):
                yield tile(headline)
            continue
        same = [each for each in found if each.metric == found[0].metric]
        kept_at = [_kept(each, chosen.get(each.trial)) for each in same]
        ends = [float(each.values[at]) for each, at in zip(same, kept_at, strict=True)]
        order, _ = ranked(ends, range(len(ends)), [0] * len(ends), same[0].better)
        best, kept = same[order[0]], kept_at[order[0]]
        last = len(best.steps) - 1
        highest, end = float(best.values[best.best]), float(best.values[-1])
        value = float(best.values[kept])
        if kept == last and highest == end and _is_headline(about, best):
            continue
        note = f"{stage}, at the end"
        if kept != last:
            step = f"step {best.steps[kept]:.0f}"
            note = f"{stage}, best of {last + 1} evaluations, at {step}; {number(end)} at the end"
            if chosen[best.trial][1]:
                note += f", where it stopped early ({best.steps[-1]:.0f})"
        elif highest != end:
            note += f"; {number(highest)} at step {best.steps[best.best]:.0f}"
        tone = "warn" if best.ends_worse and kept == last else ""
        if best.baseline_values is not None and np.isfinite(best.baseline_values[kept]):
            rival = float(best.baseline_values[kept])
            note += f"; {best.baseline} {number(rival)}"
            wins = value < rival if best.better == "lower" else value > rival
            tone = tone if wins else "warn"
        yield Tile(best.label, number(value), note, tone)
    trials = rows(about.tables, "trials")
    if by_stage or about.headlines or trials is None or "loss_final" not in trials:
        return
    for name, group in trials[trials["stage"] != SWEEP].groupby("stage", sort=False):
        losses = group["loss_final"].astype(float)
        if np.isfinite(losses).any():
            yield Tile("training loss", number(float(losses.min())), str(name))


def _kept(evaluation: EvaluationCurve, chosen: tuple[float, bool] | None) -> int:
    """Return the position of the step whose model was kept."""
    steps = [float(step) for step in evaluation.steps]
    return steps.index(chosen[0]) if chosen and chosen[0] in steps else len(steps) - 1


def _is_headline(about: About, evaluation: EvaluationCurve) -> bool:
    """Whether a table of results has the same number of the trained model."""
    column = evaluation.metric.removeprefix(PREFIX)
    value = number(float(evaluation.values[-1]))
    return any(best.column.name == column and number(best.mean) == value
               for best in about.headlines)  # fmt: skip


def _is_same(one: Headline, other: Headline) -> bool:
    """Whether two headlines are the same number of the same metric."""
    names = {best.column.name.removeprefix(PREFIX) for best in (one, other)}
    return len(names) == 1 and one.value == other.value


def certainty(about: About) -> Iterator[str]:
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
        yield from _against_rivals(repeated[0])
    if about.only_swept:
        yield from sweep_certainty(about.tables, about.sweeps)


def _against_rivals(best: Headline) -> Iterator[str]:
    """Yield whether the best point differs from the baseline and the second best one."""
    if best.baseline and best.to_baseline.is_known:
        yield _against(best, f"the baseline {best.baseline}", best.to_baseline)
    if not best.is_shared and best.runner_up and best.to_runner_up.is_known:
        second = (
            f"the second best, {best.runner_up} ({cell(best.column.name, best.runner_up_mean)})"
        )
        yield _against(best, second, best.to_runner_up)


def _against(best: Headline, rival: str, difference: Difference) -> str:
    """Return on which side of a rival the best point is, and whether that may be chance."""
    column, name = best.column.name, f"{best.name[:1].upper()}{best.name[1:]}"
    size, half = abs(difference.mean), difference.half
    if size == half == 0:
        return f"{name} is that of {rival} in every repetition."
    if half == 0:
        text = f"{cell(column, size)} (in every repetition)"
    elif cell(column, size) == number(size):
        text = plus_minus(size, half)
    else:
        text = f"{cell(column, size)} ± {cell(column, half)}"
    side = "above" if (difference.mean > 0) == (best.column.better == "higher") else "below"
    judged = "it may be chance" if difference.may_be_chance else "more than chance"
    return f"{name} is {text} {side} {rival}: {judged}."
