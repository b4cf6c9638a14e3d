"""Every page's code: that of tutorials and guides runs, all other code is checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from docs.generate import EXPERIMENTS
from raypipe import cli
from raypipe.commands import configuration
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware
from tests.docs.pages import DOCS, PROJECT, Block, Reader, blocks, commands, files_before

PAGES = [*sorted(DOCS.rglob("*.md")), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]
#: pages of which every block runs, unless it says what it needs
RUN = sorted(
    page for folder in ("tutorial", "howto", "explanation") for page in DOCS.glob(f"{folder}/*.md")
)
#: pages whose blocks together take more than ten seconds
SLOW = {"tutorial/sweep.md"}


def _name(page: Path) -> str:
    return str(page.relative_to(DOCS if DOCS in page.parents else PROJECT))


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if _name(page) in SLOW else []


def _each(found: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "page", [pytest.param(page, marks=_marks(page), id=_name(page)) for page in found]
    )


@_each(RUN)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    for name in ("RAYPIPE_RUNS", "RAYPIPE_FAULTS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    reader = Reader(folder)
    for name in [name for name, module in sys.modules.items() if _is_temporary(module)]:
        monkeypatch.delitem(sys.modules, name)  # a module of another test may have its name
    for block in [*files_before(page), *blocks(page)]:
        reader.follow(block)


def _is_temporary(module: object) -> bool:
    """Whether a module is a file of an earlier test."""
    return str(getattr(module, "__file__", None) or "").startswith(
        tempfile.gettempdir() + "/pytest"
    )


ALL = [block for page in PAGES for block in blocks(page)]


def _of(*languages: str) -> pytest.MarkDecorator:
    chosen = [block for block in ALL if block.language in languages]
    marked = [pytest.param(b, id=b.place) for b in chosen]
    return pytest.mark.parametrize("block", marked)


@_of("python")
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.place, "exec", dont_inherit=True)


@_of("bash")
def test_shell_commands_are_valid(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        for part in re.split(r"&&|\||;|--wrap| -- ", re.sub(r"\s>\s*\S+$", "", line)):
            if re.match(r"\s*(?:\w+=\S+\s+)*raypipe\s", part):
                single = Block(block.page, block.line, "bash", "", part)
                for command in commands(single):
                    with suppress(typer.Exit):  # an option such as --list ended it
                        accept(command.words[1:])


def accept(arguments: list[str]) -> None:
    """Check arguments as the command line does, and overrides of a configuration that exists."""
    group: Any = typer.main.get_command(cli.app)
    rest = cli._spread_stages(arguments)
    if rest == ["--help"]:
        return
    context = typer.Context(group)
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, rest)
    with group.make_context(name, list(rest)) as context:
        config = context.params.get("config")
        if config is not None and Path(config).is_file():
            # not the name of a published model, whose configuration would be downloaded
            given = [
                text
                for text in context.params.get("overrides") or []
                if "=" in text and not re.match(r"[\w.]*model=\S+/", text)
            ]
            node = [Hardware("docs", 2, 2**34)]
            profile = context.params.get("profile") or "auto"
            configuration.resolve(configuration.read(config), given, profile, node)


@_of("yaml")
def test_yaml_has_keys_that_an_experiment_accepts(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = yaml.safe_load(block.text)
    assert isinstance(values, Mapping)
    if block.is_file or (block.page in RUN and not block.needs):
        return  # commands read it
    monkeypatch.chdir(PROJECT)
    errors = []
    for name in [*(f"experiments.{name}" for name in EXPERIMENTS), "raypipe.scripts"]:
        for stage in ("", "train", "train_small"):
            section = {stage: values} if stage else values
            text = yaml.safe_dump({"experiment": name, **section})
            try:
                document = configuration.parse(text, block.place)
                configuration.resolve(document, (), "auto", [Hardware("docs", 2, 2**34)])
            except ConfigError as error:
                if all(line.endswith(": field required") for line in str(error).splitlines()):
                    return  # a part of a section
                errors.append(str(error))
            else:
                return
    raise AssertionError("\n".join(errors))


def test_a_guide_has_no_block_without_a_language() -> None:
    without = [block.place for block in ALL if not block.language and block.page in RUN]
    assert without == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.S | re.M)
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            dead.append(target)
    assert dead == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: no dead link, no page without a place; and it loads nothing from elsewhere."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=PROJECT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.search(page.read_text("utf-8")), page
