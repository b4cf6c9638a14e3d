"""The report's page: building it from a run directory, and the sections that every run has.

The first screen has four boxes of at most three sentences, each made by one rule.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed
from raypipe.hardware import bytes_text
from raypipe.redaction import shown_traceback
from raypipe.report.formatting import counted, heading, with_interval
from raypipe.report.parts import (
    Code,
    Fold,
    Part,
    Pill,
    Section,
    TableView,
    Tile,
    cells,
    own_columns,
    render,
)
from raypipe.report.plots import rows
from raypipe.report.results import (
    SWEEP,
    Declarations,
    RunResults,
    variants_of,
)
from raypipe.report.sections import (
    files_section,
    race_section,
    range_tiles,
    search_section,
    sweep_asked,
    sweep_section,
    table_section,
    tile,
    training_section,
    variants_section,
)
from raypipe.report.tables import Headline, Rival
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_tables

log = logging.getLogger(__name__)

Sections = Callable[[Mapping[str, pd.DataFrame]], Sequence[Section]]

_WORST = ("failed", "out_of_memory", "interrupted")
_FILE = "config.yaml"
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")  # between two sentences


def build(
    run_dir: RunDirectory,
    title: str,
    sections: Sections | None,
    command: str,
    declared: Declarations,
) -> str:
    """Write ``report/index.html`` and ``report/figures/``; return the path of the page.

    ``sections`` returns the experiment's own sections from the tables; ``title`` is its name, and
    ``command`` the one that continues this run. They are of one point, so a matrix has none.
    ``declared`` are its tables and metrics, which the summary and the tables' sections are made of.
    """
    tables = read_tables(run_dir)
    own: Sequence[Section] = ()
    try:
        own = sections(tables) if sections and not variants_of(tables) else ()
    except Exception:
        message = "the report is without the experiment's sections\n%s"
        log.error(message, shown_traceback())  # noqa: TRY400
    configuration = run_dir.read(run_dir.config).decode()
    run = RunResults(tables, title, command, configuration, declared, own, run_dir)
    for name, content in page_files(run).items():
        run_dir.write(f"{run_dir.report}/{name}", content)
    return f"{run_dir.report}/index.html"


def page_files(run: RunResults) -> dict[str, bytes]:
    """Return the content of the report's files by name, ``index.html`` last.

    A section whose tables are missing or empty is left out, and so is that of a table that a
    section of the experiment covers. Tables with headline numbers come first.

    Raises:
        ValueError: two plots share a name.

    """
    status = _status(run)
    about = () if run.directory is None else said_of(run.directory)
    pill = Pill.of_status(status) if status else None
    return render(run.title, pill, page_sections(run), about)


def said_of(run_dir: RunDirectory) -> list[Pill | str]:
    """Return the tags and the note of a run, which its user gave it."""
    if not run_dir.exists(run_dir.notes):
        return []
    from raypipe.store import run_notes  # most runs have none

    notes = run_notes.read(run_dir)
    return [*map(Pill, notes.tags), *filter(None, [notes.note])]


def page_sections(run: RunResults) -> list[Section]:
    """Return the sections of a run's page; those that show nothing are among them."""
    covered = {name for section in run.sections for name in section.covers if section.parts}
    free = [results for results in run.results if results.table.name not in covered]
    return [
        summary_section(run),
        _failures(run, recovered=_status(run) in ("", "succeeded")),
        sweep_section(run),
        search_section(run.search),
        *(table_section(results, run.search) for results in free if results.headlines),
        files_section(run),
        race_section(rows(run.tables, "race")),
        variants_section(run),
        *run.sections,
        *(table_section(results, run.search) for results in free if not results.headlines),
        training_section(run),
        _stages(run),
        _environment(run),
        _repetition(run),
    ]


def _status(run: RunResults) -> str:
    """Return the worst status of a stage; empty without stages."""
    stages = rows(run.tables, "stages")
    statuses = [] if stages is None else list(stages["status"])
    return next((status for status in _WORST if status in statuses), "succeeded" * bool(statuses))


def summary_section(run: RunResults) -> Section:
    """Return the summary of a run, from its declared tables only; empty if no stage is recorded."""
    if rows(run.tables, "stages") is None:
        return Section("Summary", [])
    command: list[Part] = [Code(text) for text in _asked_command(run)]
    answers: dict[str, list[Part]] = {
        "What was asked": [" ".join(asked(run)), *command],
        "What came out": came_out(run),
        "How certain": [*certainty(run)],
        "What to do next": next_step(run),
    }
    return Section("Summary", [{name: _short(parts) for name, parts in answers.items()}])


def _short(parts: Sequence[Part]) -> list[Part]:
    """Return the parts of an answer without the paragraphs after its third sentence.

    raypipe's own answers are no longer; the sections of an experiment may say more.
    """
    kept: list[Part] = []
    count = 0
    for part in parts:
        count += len(_SENTENCE.findall(part)) + 1 if isinstance(part, str) else 0
        if count <= 3 or not isinstance(part, str):
            kept.append(part)
    return kept


def _asked_command(run: RunResults) -> list[str]:
    """Return the newest command as it was given; none if it is not known."""
    given = run.nodes.get("command", pd.Series(dtype=object)).dropna()
    return [str(command) for command in given.head(1)]


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
    seeds, word = run.count_points(seeds=True), "Varied"
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
        parts.append(tuple(shown))
    parts += run.not_finite
    if not parts and run.declared.core is not None:
        parts.append("No declared table has a number.")
    return parts


def summary_tiles(run: RunResults) -> list[Tile]:
    """Return a tile for each best result, and for the best training of each stage: eight at most.

    Without any they are the ranges of numbers.
    """
    named = {best.metric for best in run.measured}
    bests = [*run.measured, *(b for b in run.training_headlines if b.metric not in named)]
    tiles = [*map(tile, [*bests, *run.recommended])]
    return (tiles or [each for of in run.results for each in range_tiles(of)])[:8]


def certainty(run: RunResults) -> Iterator[str]:
    """Yield what the run's tests say: the experiment's own, else the intervals over repetitions."""
    repeated = [best for best in run.headlines if best.runs > 1]
    if repeated:
        counts = dict.fromkeys(f([best.runs for best in repeated]) for f in (min, max))
        several = " to ".join(map(str, counts))
        yield f"Means of {several} repetitions; ± is Student's 95 % confidence interval."
    elif run.headlines and not run.tested:
        several = " of each" if any(best.points > 1 for best in run.headlines) else ""
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
    """Return the first that applies: continue, the experiment's advice, more seeds."""
    advised = next((each.advice for each in run.sections if each.advice), ())
    steps = (_failed(run), advised, _repeat(run))
    return next(filter(None, map(list, steps)), ["The tables suggest no next step."])


def _failed(run: RunResults) -> Iterator[Part]:
    """Yield how to see the errors of three units that failed in the end, and how to continue."""
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
            for unit in list(dict.fromkeys(map(str, units)))[:3]]  # fmt: skip
    if lines := [*logs, *filter(None, [run.command])]:
        yield Code("\n".join(lines))


def _repeat(run: RunResults) -> Iterator[Part]:
    """Yield more seeds where a point has one run, or too few to tell the best from others.

    The experiment's own tests, and a race, say for themselves how many are needed. No number of
    seeds tells equal values apart.
    """
    if "seed:" not in run.configuration or run.tested or rows(run.tables, "race") is not None:
        return
    needed = run.seeds_needed
    for best in sorted(run.headlines, key=lambda best: best.runs == 1)[:1]:
        rivals = (best.baseline, best.second if best.ties == 1 else None)
        doubtful = any(r is not None and r.may_be_chance and r.half > 0 for r in rivals)
        if best.runs == 1:
            lost = any(each.baseline and each.baseline.gain <= 0 for each in run.headlines)
            doubtful = best.ties == 1 and not lost
        more = needed if best.runs < needed else 2 * best.runs
        option = f"{best.repeats}={more}" if best.repeats else _seeds(run, more)
        if doubtful and option:
            yield f"Repeat with {more} seeds to find out what is chance, with:"
            yield Code(option)


def _seeds(run: RunResults, count: int) -> str:
    """Return what gives a matrix or a function ``count`` seeds in the same run; else empty."""
    if SEED in run.tables.get("calls", ()) and SEED not in run.varied:
        return f"{SEED}=0..{count - 1}"
    keys = [key for key in run.varied if is_seed(key)]
    return f"--matrix runs={count}" if keys in ([], [SEED]) else ""


def _failures(run: RunResults, *, recovered: bool) -> Section:
    """Return the failed attempts; out of memory is an expected outcome of a sweep's trial."""
    texts, failures = [], run.failures
    if others := len(run.tables.get("failures", ())) - len(failures):
        texts = [f"The table failures has {others} more, of units that are not asked for any more."]
    failures = failures[(failures["stage"] != SWEEP) | (failures["kind"] != "out_of_memory")]
    if failures.empty:
        return Section("Failures", texts, "alert recovered")
    kinds = failures["kind"].astype(str).str.replace("_", " ")
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.value_counts().items())
    end = " Every stage succeeded in the end." if recovered else ""
    text = " ".join([f"{counted(len(failures), 'attempt')} failed: {counts}.{end}", *texts])
    failures = failures.assign(
        kind=cells(Pill(kind, "bad") for kind in kinds),
        message=cells(Code(text) for text in failures["message"].fillna("").astype(str)),
    )
    view = TableView(failures, run.core("failures").shown, "Failed attempts")
    css = "alert recovered" if recovered else "alert"
    return Section("Failures", [text, Fold("Failed attempts", [view]) if recovered else view], css)


def _stages(run: RunResults) -> Section:
    if (stages := rows(run.tables, "stages")) is None:
        return Section("Stages", [])
    pills = cells(Pill.of_status(str(status)) for status in stages["status"])
    ordered = stages.assign(status=pills).sort_values("started_at", kind="stable")
    first = ["stage", "variant"] if run.varied else ["stage"]
    return Section("Stages", [TableView(ordered, own_columns(ordered, first), "Stages")])


def _environment(run: RunResults) -> Section:
    nodes = run.nodes.drop(columns="command", errors="ignore")  # the summary shows it
    text = "Of the last command; the table environment has the nodes of all commands."
    view = TableView(nodes, label="Nodes and packages", caption=text)
    return Section("Environment", [view])


def _repetition(run: RunResults) -> Section:
    """Return the commands that repeat a run elsewhere, and what they need."""
    parts: list[Part] = []
    if run.configuration:
        parts += [
            "The configuration below has every setting, also those of the profile. Save it as "
            f"{_FILE}, then:",
            Code(f"raypipe run {_FILE} --run-dir repeated"),
            "The folder code of the run keeps the code that ran: raypipe show --code prints it, "
            "and raypipe replay computes results again.",
            Fold("Resolved configuration", [Code(run.configuration)]),
        ]
    if run.command and run.command not in _asked_command(run):  # which the summary shows
        parts += ["To continue this run, or compute more in it:", Code(run.command)]
    return Section("How to repeat", parts)
