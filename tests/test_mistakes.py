"""Typical mistakes of newcomers: each ends in one message that says what is wrong and what to do.

The table has what was typed, and the words that the message must have. A mistake in the command or
the configuration has exit status 2 and leaves nothing behind. One that only the running code can
show has exit status 1, keeps what is finished, and is a row in ``failures``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

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


#: words of a command, and the words that its message must have
MISTAKES = [
    # names of files and commands
    ("rnu train.yaml", "No such command 'rnu'"),
    ("run train.yaml --rundir r", "--rundir", "--run-dir"),
    ("run trian.yaml", "no such file", "did you mean train.yaml?"),
    ("run folder", "folder: cannot be read"),
    ("run", "Missing argument 'CONFIG'"),
    # the file
    ("run syntax.yaml", "syntax.yaml: not valid YAML", "line 2"),
    ("run twice.yaml", "the key 'cpus' is given twice"),
    ("run list.yaml", "must be a mapping of keys to values"),
    ("run neither.yaml", "must name an importable module", "function:"),
    ("run both.yaml", "has both experiment and function"),
    ("run nowhere.yaml", "experimnts.transformer: cannot be imported", "run from the directory"),
    ("run empty.yaml", "has no EXPERIMENT"),
    ("run broken.yaml", "SyntaxError", "broken.py"),
    ("run raising.yaml", "no license", "raising.py:1"),
    ("run lacking.yaml", "package_that_is_not_installed", "lacking.py:1", "install it"),
    # keys and values
    ("run train.yaml train.training.stepz=3", "did you mean train.training.steps?"),
    ("run train.yaml train.training.steps=many", "train.training.steps = 'many'", "integer"),
    ("run train.yaml train.training.steps=-1", "train.training.steps = -1", "greater than 0"),
    ("run train.yaml train.training.precision=fp4", "'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'"),
    ("run train.yaml train=fast", "train = 'fast'", "must be a section"),
    ("run train.yaml train.training.steps", "dotted.key=value"),
    ("run train.yaml matrix.x=[1", "not valid YAML"),
    (
        "run train.yaml train.training.micro_batch=8 train.training.accumulation=2 "
        "train.training.effective_batch=8",
        "effective_batch",
        "micro_batch",
        "contradict each other",
    ),
    ("run train.yaml --profile gpuu", "gpuu"),
    ("run train.yaml --only trian", "unknown stage", "did you mean train?"),
    ("run train.yaml --matrix train.training.sed=[1,2]", "did you mean train.training.seed?"),
    ("run train.yaml --matrix train.training.seed=[]", "has no value"),
    ("run train.yaml --time-budget soon", "must be a time above zero, such as 2h"),
    ("run train.yaml train.scaling.gpus_per_worker=1", "gpus_per_worker", "GPU"),
    ("run grid.yaml cpus=500", "cpus = 500", "lower it"),
    ("run train.yaml --address 127.0.0.1:1", "no Ray cluster can be reached"),
    ("sweep train.yaml", "give it a section, such as `sweep:"),
    # run directories
    ("run train.yaml --run-dir notes.txt", "is a file, not a directory"),
    ("results folder", "is not a run directory"),
    ("report folder", "is not a run directory"),
    # functions
    ("map own", "must be MODULE:FUNCTION"),
    ("map own.py:score x=1", "did you mean own:score?"),
    ("map onw:score x=1", "did you mean own?"),
    ("map own:scroe x=1", "did you mean score?"),
    ("map own:Model x=1", "no argument 'x'"),
    ("map own:score", "no value for the argument x"),
    ("map own:score x=1 scal=2", "did you mean scale?"),
    ("map own:score x=5..1", "end lies before its start"),
    ("map own:score x=[]", "is an empty list"),
    ("map own:score x=[1,1]", "the value 1 is given twice"),
    ("map own:waits x=1", "is async"),
    ("map own:yields x=1", "yields"),
    ("map own:by_position x=1", "remove the `/`"),
    ("run train.yml", "did you mean train.yaml?"),
    ("run train.yaml train.training.compile=7", "train.training.compile"),
    ("run train.yaml --only train trian", "did you mean train?"),
    ("run train.yaml --only", "requires an argument"),
    ("run train.yaml --profile cup", "did you mean cpu?"),
    ("run train.yaml train.training.precision=tf32", "this CPU lacks tf32"),
    ("run train.yaml train.scaling.strategy=zero", "'ddp' or 'fsdp'"),
    ("run train.yaml train.scaling.workers=[3,2]", "the first is above the second"),
    ("run train.yaml train.training.monitor={patience: 0}", "monitor.patience"),
    ("run train.yaml train.loader=fast", "must be a section with keys"),
    ("plan train.yaml x.y=1", "unknown key"),
    ("run train.yaml --local --address auto", "--local runs without a cluster"),
    ("run train.yaml --run-dir notes.txt/below", "cannot be written"),
    ("run train.yaml --run-dir nofs://bucket/x", "cannot be opened"),
    ("run train.yaml --run-dir ~nobodyx/x", "--run-dir '~nobodyx/x': is not a valid path"),
    ("plan train.yaml --run-dir x\udcff", "must be UTF-8 text"),
    ("results ~nobodyx/x", "is not a valid path"),
    ("ls nowhere", "does not exist"),
    ("ls notes.txt", "notes.txt: is a file; `raypipe ls DIR` looks in a folder"),
    ("compare nowhere", "give two run directories or more"),
    ("compare notes.txt notes.txt", "is not a run directory: it is a file"),
    ("show nowhere", "is not a run directory: it does not exist"),
    *(
        (f"{verb} notes.txt", "notes.txt: is not a run directory: it is a file")
        for verb in ("show", "results", "logs", "watch", "report")
    ),
]
#: calls that fail while they run, and the words of their message
FAILURES = [
    ("map own:nothing x=1", "returned nothing (None); return a mapping"),
    ("map own:array x=1", "an array (ndarray) of shape (3,); return a mapping of single values"),
    ("map own:pair x=1", "a tuple of 2 values"),
    ("map own:nested x=1", "a list of 2 values for 'history'"),
    ("map own:same_name x=1", "'x', which is also an argument; rename it"),
    ("map own:text x=1 --minimize loss", "'low' for 'loss'", "return a number"),
    ("map own:raises x=1", "ZeroDivisionError"),
    ("map own:leaves x=1", "called sys.exit('bye')"),
]


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


def ended(words: str) -> command.Ended:
    given = re.findall(r"(?:\[.*?\]|\{.*?\}|\S)+", words)
    return command.in_process(InlineLauncher(), *given, environment={})


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda row: ascii(row[0]))
def test_a_mistake_ends_in_one_message_and_leaves_nothing(mistake, folder):
    words, *says = mistake
    before = files(folder)
    found = ended(words)
    assert found.status == 2, found.output
    assert [text for text in says if text not in found.output] == [], found.output
    assert "Traceback" not in found.output
    assert len(found.output.strip().splitlines()) <= 6, found.output
    assert files(folder) == before


@pytest.mark.parametrize("failure", FAILURES, ids=lambda row: row[0])
def test_a_call_that_fails_ends_in_one_message_and_continues(failure):
    words, *says = failure
    found = ended(words)
    assert found.status == 1, found.output
    assert [text for text in says if text not in found.output] == [], found.output
    assert "continue with: raypipe map" in found.output
