"""Every page's code: that of tutorials and guides runs, all other code is checked.

The generated parts, and what quotes the code, say what the code does.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from docs import generate
from docs.generate import EXPERIMENTS
from raypipe import cli
from raypipe.commands import configuration
from raypipe.commands.configuration import settings_model
from raypipe.config.validation import keys_of
from raypipe.errors import ConfigError
from raypipe.graph.configuration import load_experiment
from raypipe.hardware import Hardware
from tests.command import command_line, finish, forget, spawn
from tests.docs.pages import DOCS, PROJECT, Reader, blocks, commands, files_before

PAGES = [*sorted(DOCS.rglob("*.md")), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]
#: pages of which every block runs, unless it says what it needs
RUN = sorted(
    page for folder in ("tutorial", "howto", "explanation") for page in DOCS.glob(f"{folder}/*.md")
)
#: pages whose blocks together take more than two seconds
SLOW = {
    "explanation/prediction.md",
    "howto/augmentation.md",
    "howto/load_model.md",
    "howto/training_optimizer.md",
    "tutorial/function.md",
    "tutorial/sweep.md",
    "tutorial/training.md",
}


def _name(page: Path) -> str:
    return str(page.relative_to(DOCS if DOCS in page.parents else PROJECT))


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=_name(p), marks=[pytest.mark.slow] * (_name(p) in SLOW)) for p in RUN],
)
@pytest.mark.usefixtures("report")
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    for name in ("RAYPIPE_RUNS", "RAYPIPE_FAULTS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    reader = Reader(folder)
    forget(tmp_path.parent)  # a module of another test may have the name of one of the page
    for block in [*files_before(page), *blocks(page)]:
        reader.follow(block)


ALL = [block for page in PAGES for block in blocks(page)]


def _of(*languages: str) -> pytest.MarkDecorator:
    chosen = [block for block in ALL if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=lambda block: block.place)


@_of("python")
def test_python_compiles(block):
    compile(block.text, block.place, "exec", dont_inherit=True)


@_of("bash")
def test_shell_commands_are_valid(block, monkeypatch):
    monkeypatch.chdir(PROJECT)
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        for part in re.split(r"&&|\||;|--wrap| -- ", re.sub(r"\s>\s*\S+$", "", line)):
            if re.match(r"\s*(?:\w+=\S+\s+)*raypipe\s", part):
                for _, words, _ in commands(part):
                    with suppress(typer.Exit):  # an option such as --list ended it
                        accept(words[1:])


def accept(arguments: list[str]) -> None:
    """Check arguments as the command line does, and overrides of a configuration that exists."""
    group = command_line()
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
def test_yaml_has_keys_that_an_experiment_accepts(block, monkeypatch):
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


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files_and_headings(page):
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


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """Strictly: no dead link, no page without a place; and it loads nothing from elsewhere."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    warning = {"NO_MKDOCS_2_WARNING": "1"}
    finish(spawn(PROJECT, sys.executable, "-m", *command, environment=warning))
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.search(page.read_text("utf-8")), page


_VALUE = "\0"  # a value that a message inserts


def _texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a module; an f-string is one text with its values left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else _VALUE for v in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_quoted_messages_are_in_the_source():
    sources = (PROJECT / "raypipe").rglob("*.py")
    texts = [text for file in sources for text in _texts(ast.parse(file.read_text("utf-8")))]
    messages = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 25
    for message in messages:
        pattern = re.compile(r"[\s\S]*".join(map(re.escape, message.strip(".").split("..."))))
        assert any(map(pattern.search, texts)), message


def test_the_generated_parts_are_up_to_date() -> None:
    generated = generate.pages()
    assert len(generated) == 5
    for page, text in generated.items():
        assert (DOCS / page).read_text(encoding="utf-8") == text, "run `make docs`"


def test_every_question_of_the_architecture_leads_to_a_file() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| Where [^|]*\? \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(answers) >= 20
    answers += re.findall(r"`((?:raypipe|experiments)/[\w/]+\.py)`", text)
    assert [answer for answer in answers if not (PROJECT / answer).exists()] == []


def test_the_tour_of_the_architecture_is_of_functions_and_half_an_hour_long() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    lines = 0
    for file, names in re.findall(r"^\| `([^`]+)`: ([^|]+) \|", text, re.MULTILINE):
        tree = ast.parse((PROJECT / file).read_text(encoding="utf-8"))
        for name in re.findall(r"`([^`]+)`", names):
            found: Any = tree
            for part in name.split("."):
                (found,) = (each for each in found.body if getattr(each, "name", "") == part)
            lines += found.end_lineno - found.lineno + 1
    assert 500 < lines < 1200


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_key_has_a_sentence(name: str) -> None:
    keys = keys_of(settings_model(load_experiment(f"experiments.{name}", "test")))
    assert len(keys) > 50
    without = [k.name for k in keys if len(k.meaning) < 15 or not k.meaning.endswith(".")]
    assert without == []


SCRIPTS = PROJECT / "examples" / "scripts"
SCRIPTS_GUIDE = (DOCS / "scripts.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```yaml\n(.*?)^```$", SCRIPTS_GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["plain", "trainer", "light"])
def test_the_guide_shows_the_examples(name: str) -> None:
    shown = [yaml.safe_load(text.replace("train.py", "plain.py")) for text in SHOWN]
    assert yaml.safe_load((SCRIPTS / f"{name}.yaml").read_text()) in shown
