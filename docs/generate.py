"""Write the generated parts of the docs: tables, configuration keys, commands and the API.

Run as ``python -m docs.generate`` from the repository root; a test checks that it changes nothing.
Generated parts lie between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from docs.benchmark_tables import leaderboard_lines, median_lines
from docs.command_reference import api_lines, command_lines
from raypipe.commands.configuration import CommonSettings
from raypipe.config.validation import Key, keys_of
from raypipe.functions.experiment import FunctionSettings, function_experiment
from raypipe.graph.configuration import load_experiment
from raypipe.graph.experiment import Experiment
from raypipe.graph.tables import CORE
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT, Column, Table
from raypipe.study.tables import TABLES as STUDIES
from raypipe.training.settings import TrainStageSettings

DOCS = Path(__file__).parent
EXPERIMENTS = (
    *("pabbo_lda", "pabbo_lda.surrogate_training", "teleclass", "transformer"),
    *("lm_pretrain", "summarization"),
)


def main() -> None:
    """Rewrite the generated parts in place."""
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the pages that have generated parts, with these up to date."""
    modules = [*(f"experiments.{name}" for name in EXPERIMENTS), "raypipe.scripts"]
    experiments = [load_experiment(module, "docs") for module in modules]
    parts: dict[str, dict[str, Iterable[str]]] = {
        "results.md": {"tables": _tables(experiments)},
        "configuration.md": {"keys": _keys(experiments)},
        "reference/commands.md": {"commands": command_lines()},
        "reference/api.md": {"api": api_lines()},
        "benchmark.md": {"leaderboard": leaderboard_lines(), "evaluations": median_lines()},
    }
    return {page: _with(page, of_page) for page, of_page in parts.items()}


def _with(page: str, parts: Mapping[str, Iterable[str]]) -> str:
    """Return a page with its generated parts, by their names."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, lines in parts.items():
        text = _replaced(text, page, name, lines)
    return text


def _replaced(text: str, page: str, name: str, lines: Iterable[str]) -> str:
    start, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
    content = "\n".join(lines)
    if not pattern.search(text):
        raise ValueError(f"{page}: the markers of {name} are missing")
    return pattern.sub(lambda _: f"{start}\n\n{content}\n{end}", text)


def _tables(experiments: Iterable[Experiment]) -> Iterator[str]:
    yield "### In every table\n"
    yield from _columns((RUN_ID, VARIANT, COMMAND_ID))
    yield "### Of every run\n"
    for table in CORE:
        yield from _table(table)
    yield "### Of a search, a race or a sweep\n"
    for table in STUDIES:
        yield from _table(table)
    yield "### Of a function\n"
    for table in function_experiment("module:function", None).tables:
        yield from _table(table)
    for experiment in experiments:
        yield f"### Of {experiment.name}\n"
        for table in experiment.tables:
            yield from _table(table)
        if experiment.step_metrics:
            yield "In addition, `steps` and the last evaluation in `trials` have:\n"
            yield from _columns(experiment.step_metrics)


def _table(table: Table) -> Iterator[str]:
    yield f"**`{table.name}`**: one row is {table.row}.\n"
    yield from _columns(table.columns)


def _columns(columns: Iterable[Column]) -> Iterator[str]:
    yield "| column | type | unit | meaning |"
    yield "|---|---|---|---|"
    for column in columns:
        yield f"| `{column.name}` | {column.type} | {column.unit} | {_cell(column.meaning)} |"
    yield ""


def _keys(experiments: Iterable[Experiment]) -> Iterator[str]:
    yield "### Of every training stage\n"
    yield from _key_table(keys_of(TrainStageSettings))
    yield "### Of every experiment\n"
    yield from _key_table(keys_of(CommonSettings))
    yield "### Of a function\n"
    yield from _key_table(keys_of(FunctionSettings))
    common = {key.name for key in keys_of(TrainStageSettings)}
    for experiment in experiments:
        yield f"### Of {experiment.name}\n"
        keys = keys_of(experiment.settings)
        stages = {
            name
            for name, field in experiment.settings.model_fields.items()
            if isinstance(field.annotation, type)
            and issubclass(field.annotation, TrainStageSettings)
        }
        own = [key for key in keys if not _is_common(key.name, stages, common)]
        yield from _key_table(own)


def _is_common(name: str, stages: set[str], common: set[str]) -> bool:
    stage, _, rest = name.partition(".")
    return stage in stages and rest in common


def _key_table(keys: Iterable[Key]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        default = "required" if key.required else "" if key.is_section else _default(key.default)
        kind = _cell(key.type)
        yield f"| `{key.name}` | {kind} | {default} | {_cell(key.meaning)} |"
    yield ""


def _default(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping) and not value:
        return "`{}`"
    plain = list(value) if isinstance(value, tuple) else value
    if not isinstance(plain, str | int | float | bool | list | dict):
        plain = str(plain)
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**9)
    return f"`{_cell(text.removesuffix('...' + chr(10)).strip())}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
