"""The configurations of the guide are those of the examples, which are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[3]
EXAMPLES = PROJECT / "tests" / "raypipe" / "examples" / "scripts"
GUIDE = (PROJECT / "docs" / "scripts.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["plain", "trainer", "light"])
def test_the_guide_shows_the_examples(name: str) -> None:
    shown = [yaml.safe_load(text.replace("train.py", "plain.py")) for text in SHOWN]
    assert yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()) in shown


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("trainer", ["class JsonLines(TrainerCallback):", "resume_from_checkpoint=get_last_check"]),
        ("light", ["flush_logs_every_n_steps=10", "accumulate_grad_batches=args.accum"]),
    ],
)
def test_the_guide_shows_lines_of_the_scripts(name: str, lines: list[str]) -> None:
    script = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert [line for line in lines if line not in script or line not in GUIDE] == []
