"""Typical mistakes of newcomers: each ends in one message that says what is wrong and what to do.

The table has what was typed, and the words that the message must have. A mistake in the command or
the configuration has exit status 2 and leaves nothing behind. One that only the running code can
show has exit status 1, keeps what is finished, and is a row in ``failures``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from raypipe.launch.inline import InlineLauncher
from tests import command

FUNCTIONS = """
import sys
import numpy as np

def score(x, scale=1):
    return {"y": x * scale}
def nothing(x):
    y = x * 2
def array(x):
    return np.zeros(3)
def pair(x):
    return x, x + 1
def nested(x):
    return {"history": [1, 2]}
def raises(x):
    return {"y": 1 / (x - 1)}
def leaves(x):
    sys.exit("bye")
def same_name(x):
    return {"x": x + 1}
def text(x):
    return {"loss": "low"}
async def waits(x):
    return {"y": 1}
def yields(x):
    yield {"y": 1}
def by_position(x, /):
    return {"y": 1}
class Model:
    pass
"""
FILES = {
    "own.py": FUNCTIONS,
    "broken.py": "def f(:\n",
    "raising.py": "raise RuntimeError('no license')\n",
    "lacking.py": "import package_that_is_not_installed\n",
    "empty.py": "EXPERIMENT = None\n",
    "train.yaml": """
experiment: experiments.transformer
data: {source: random, samples: 64}
model: {numeric: 4, hidden: 8, layers: 1, heads: 2}
train: {training: {effective_batch: 8, steps: 2, epochs: null}}
""",
    "grid.yaml": "function: own:score\narguments: {x: [1, 2]}\n",
    "empty.yaml": "experiment: empty\n",
    "broken.yaml": "experiment: broken\n",
    "raising.yaml": "experiment: raising\n",
    "lacking.yaml": "experiment: lacking\n",
    "nowhere.yaml": "experiment: experimnts.transformer\n",
    "both.yaml": "experiment: x\nfunction: own:score\n",
    "neither.yaml": "arguments: {x: 1}\n",
    "syntax.yaml": "experiment: [x\n",
    "twice.yaml": "function: own:score\ncpus: 1\ncpus: 2\n",
    "list.yaml": "- a\n- b\n",
    "notes.txt": "not a run",
    "folder/notes.txt": "not a run",
}


class Mistake(NamedTuple):
    """Words of a command, the words that its message must have, and the exit status."""

    words: str
    says: tuple[str, ...]
    status: int = 2


MISTAKES = {
    # names of files and commands
    "unknown command": Mistake("rnu train.yaml", ("No such command 'rnu'",)),
    "unknown option": Mistake("run train.yaml --rundir r", ("--rundir", "--run-dir")),
    "file name misspelled": Mistake("run trian.yaml", ("no such file", "did you mean train.yaml?")),
    "a folder instead of a file": Mistake("run folder", ("folder: cannot be read",)),
    "no file at all": Mistake("run", ("Missing argument 'CONFIG'",)),
    # the file
    "not YAML": Mistake("run syntax.yaml", ("syntax.yaml: not valid YAML", "line 2")),
    "a key given twice": Mistake("run twice.yaml", ("the key 'cpus' is given twice",)),
    "a list": Mistake("run list.yaml", ("must be a mapping of keys to values",)),
    "no experiment": Mistake("run neither.yaml", ("must name an importable module", "function:")),
    "two experiments": Mistake("run both.yaml", ("has both experiment and function",)),
    "no such module": Mistake(
        "run nowhere.yaml", ("experimnts.transformer: cannot be imported", "run from the directory")
    ),
    "a module without an experiment": Mistake("run empty.yaml", ("has no EXPERIMENT",)),
    "a syntax error in the module": Mistake("run broken.yaml", ("SyntaxError", "broken.py")),
    "a module that raises": Mistake("run raising.yaml", ("no license", "raising.py:1")),
    "a package that is missing": Mistake(
        "run lacking.yaml", ("package_that_is_not_installed", "lacking.py:1", "install it")
    ),
    # keys and values
    "key misspelled": Mistake(
        "run train.yaml train.training.stepz=3", ("did you mean train.training.steps?",)
    ),
    "text for a number": Mistake(
        "run train.yaml train.training.steps=many", ("train.training.steps = 'many'", "integer")
    ),
    "a negative number": Mistake(
        "run train.yaml train.training.steps=-1", ("train.training.steps = -1", "greater than 0")
    ),
    "an unknown precision": Mistake(
        "run train.yaml train.training.precision=fp4", ("'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'",)
    ),
    "a value for a section": Mistake(
        "run train.yaml train=fast", ("train = 'fast'", "must be a section")
    ),
    "no equals sign": Mistake("run train.yaml train.training.steps", ("dotted.key=value",)),
    "a list cut by the shell": Mistake("run train.yaml matrix.x=[1 2]", ("not valid YAML",)),
    "batch sizes that contradict each other": Mistake(
        "run train.yaml train.training.micro_batch=8 train.training.accumulation=2 "
        "train.training.effective_batch=8",
        ("effective_batch", "micro_batch"),
    ),
    "a profile that does not exist": Mistake("run train.yaml --profile gpuu", ("gpuu",)),
    "a stage that does not exist": Mistake(
        "run train.yaml --only trian", ("unknown stage", "did you mean train?")
    ),
    "an axis that does not exist": Mistake(
        "run train.yaml --matrix train.training.sed=[1,2]", ("did you mean train.training.seed?",)
    ),
    "an axis without values": Mistake(
        "run train.yaml --matrix train.training.seed=[]", ("has no value",)
    ),
    "a time without a unit": Mistake(
        "run train.yaml --time-budget soon", ("must be a time above zero, such as 2h",)
    ),
    "more GPUs than there are": Mistake(
        "run train.yaml train.scaling.gpus_per_worker=1", ("gpus_per_worker", "GPU")
    ),
    "more CPUs than there are": Mistake("run grid.yaml cpus=500", ("cpus = 500", "lower it")),
    "no cluster at the address": Mistake(
        "run train.yaml --address 127.0.0.1:1", ("no Ray cluster can be reached",)
    ),
    "a sweep without its section": Mistake(
        "sweep train.yaml", ("give it a section, such as `sweep:",)
    ),
    # run directories
    "a file as run directory": Mistake(
        "run train.yaml --run-dir notes.txt", ("is a file, not a directory",)
    ),
    "results of no run": Mistake("results folder", ("is not a run directory",)),
    "a report of no run": Mistake("report folder", ("is not a run directory",)),
    # functions
    "no function": Mistake("map own", ("must be MODULE:FUNCTION",)),
    "a file as module": Mistake("map own.py:score x=1", ("did you mean own:score?",)),
    "module misspelled": Mistake("map onw:score x=1", ("did you mean own?",)),
    "function misspelled": Mistake("map own:scroe x=1", ("did you mean score?",)),
    "a class that needs nothing": Mistake("map own:Model x=1", ("no argument 'x'",)),
    "an argument that is missing": Mistake("map own:score", ("no value for the argument x",)),
    "an argument misspelled": Mistake("map own:score x=1 scal=2", ("did you mean scale?",)),
    "a range the wrong way round": Mistake("map own:score x=5..1", ("end lies before its start",)),
    "an empty list": Mistake("map own:score x=[]", ("is an empty list",)),
    "a value given twice": Mistake("map own:score x=[1,1]", ("the value 1 is given twice",)),
    "an async function": Mistake("map own:waits x=1", ("is async",)),
    "a generator": Mistake("map own:yields x=1", ("yields",)),
    "a positional argument": Mistake("map own:by_position x=1", ("remove the `/`",)),
    "a function that returns nothing": Mistake(
        "map own:nothing x=1", ("returned nothing (None); return a mapping",), 1
    ),
    "a function that returns an array": Mistake(
        "map own:array x=1",
        ("an array (ndarray) of shape (3,); return a mapping of single values",),
        1,
    ),
    "a function that returns a pair": Mistake("map own:pair x=1", ("a tuple of 2 values",), 1),
    "a function that returns a list in it": Mistake(
        "map own:nested x=1", ("a list of 2 values for 'history'",), 1
    ),
    "a function that returns its argument changed": Mistake(
        "map own:same_name x=1", ("'x', which is also an argument; rename it",), 1
    ),
    "a function that returns text to minimize": Mistake(
        "map own:text x=1 --minimize loss", ("'low' for 'loss'", "return a number"), 1
    ),
    "a function that raises": Mistake("map own:raises x=1", ("ZeroDivisionError",), 1),
    "a function that exits": Mistake("map own:leaves x=1", ("called sys.exit('bye')",), 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RAYPIPE_CACHE", str(folder / ".cache"))
    yield
    for name in ("own", "broken", "raising", "lacking", "empty"):
        sys.modules.pop(name, None)


def files(folder: Path) -> set[Path]:
    hidden = (".cache", "__pycache__")
    return {path for path in folder.rglob("*") if not set(hidden) & set(path.parts)}


def test_there_are_forty():
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_message(name, folder):
    mistake = MISTAKES[name]
    before = files(folder)
    ended = command.in_process(InlineLauncher(), *mistake.words.split(), environment={})
    assert ended.status == mistake.status, ended.output
    for words in mistake.says:
        assert words in ended.output
    if mistake.status == 2:
        assert "Traceback" not in ended.output
        assert len(ended.output.strip().splitlines()) <= 6, ended.output
        assert files(folder) == before
    else:
        assert "continue with: raypipe map" in ended.output
