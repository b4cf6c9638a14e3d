"""Stored units computed again, and the code that computed them, through the public commands."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pyarrow.fs as arrow_fs
import pytest

import raypipe as rp
from raypipe.commands import replay as command
from raypipe.commands.code import kept_code
from raypipe.launch.inline import InlineLauncher
from raypipe.provenance import environment_row
from raypipe.store.ledger import Ledger
from tests.command import Ended, in_process, start
from tests.raypipe.examples.hills import HILL, SEARCH

MODULE = """
import random

def helper(x):
    return (x - 3) ** 2

def score(x, seed=0):
    random.seed(seed)
    return {"loss": helper(x) + 1, "noise": random.random(), "name": f"n{x}"}
"""
TRAINING = """
from example_tasks import HeldOut
from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage, Unit
from raypipe.graph.training_stage import train_stage
from raypipe.training.settings import TrainStageSettings
from raypipe.training.weights import read_weights

class Mine(Settings):
    train: TrainStageSettings = TrainStageSettings()

class Task(HeldOut):
    def loss(self, model, batch, context):
        found = super().loss(model, batch, context)
        return found

def probe(context):
    weights, _ = read_weights(context.run_dir, context.run_dir.model("train"))
    assert not context.ledger.rows("sums")  # what it wrote before would be no computation
    for unit in context.todo():
        total = float(weights["0.weight"].sum())
        context.finish(unit, {"sums": {unit.key.upper(): {"sum": total}}})

def total(context):
    (row,) = context.ledger.rows("sums")
    context.finish("total", {"totals": {"total": {"twice": 2 * row["sum"]}}})

def stages(settings):
    train = train_stage("train", settings.train, lambda *_: Task(dropout=0.3), reads=("train",))
    later = Stage("probe", probe, [Unit("probe/0")], ("train",), ())
    return [train, later, Stage("total", total, needs=("probe",), reads=())]

EXPERIMENT = Experiment("mine", 1, Mine, stages)
"""
CONFIG = """
experiment: {name}
train:
  training: {{steps: 6, effective_batch: 16, micro_batch: 8, log_every: 1, eval_every: 3}}
  scaling: {{cpus_per_worker: 1}}
"""

SCRIPT = """
import argparse, json, os, random
from pathlib import Path
from steps import scale
parser = argparse.ArgumentParser()
for name in ("lr", "seed", "steps", "factor"):
    parser.add_argument(f"--{name}", type=float)
given = parser.parse_args()
random.seed(given.seed)
loss = float(Path("start.txt").read_text()) + random.random()
for step in range(1, int(given.steps) + 1):
    loss = scale(loss, given.lr) * given.factor
    print(json.dumps({"step": step, "loss": loss}))
print(json.dumps({"step": step, "eval_loss": loss}))
"""
SCRIPT_CONFIG = """
experiment: raypipe.scripts
parameters: {factor: 1}
train:
  command: python train.py --lr {learning_rate} --seed {seed} --steps {steps} --factor {factor}
  metrics: stdout
  files: [train.py, steps.py, start.txt]
  training: {steps: 4, learning_rate: 0.1}
  scaling: {cpus_per_worker: 1}
"""

Raypipe = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def name(folder) -> str:
    """A module of a name that no other test has, with a function."""
    found = f"mine{os.urandom(4).hex()}"
    (folder / f"{found}.py").write_text(MODULE)
    yield found
    sys.modules.pop(found, None)


@pytest.fixture
def raypipe(folder) -> Raypipe:
    def run(*words: str, expected: int = 0) -> str:
        environment = {"RAYPIPE_CACHE": str(folder / "cache")}
        ended = in_process(InlineLauncher(), *words, environment=environment)
        assert ended.status == expected, ended.output
        return ended.output

    return run


def edit(name: str, before: str, after: str) -> None:
    path = Path(f"{name}.py")
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(before, after))


def count(shown: str) -> str:
    """The last line: how many units have which outcome."""
    return shown.splitlines()[-1]


def content(run_dir: str) -> dict[str, str]:
    files = (path for path in Path(run_dir).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def script(folder) -> Path:
    """The configuration of a script, a module that it imports, and its data."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "steps.py").write_text("def scale(loss, rate):\n    return loss * (1 - rate)\n")
    (folder / "start.txt").write_text("4.0")
    (folder / "c.yaml").write_text(SCRIPT_CONFIG)
    return folder / "c.yaml"


def test_calls_are_equal_and_the_run_directory_is_only_read(name, raypipe):
    raypipe("map", f"{name}:score", "x=0..9", "seed=[1,2]", "--run-dir", "r", "--local")
    before = content("r")
    shown = raypipe("replay", "r")
    assert "20 stored units, a sample of 3 (choose with --all or names)" in shown
    assert shown.count(": equal\n") == 3
    assert "not compared: calls.attempt, calls.duration_s, calls.worker" in shown
    assert "changed since" not in shown
    assert shown.splitlines()[-1] == "3 equal"
    assert raypipe("replay", "r", "--all").splitlines()[-1] == "20 equal"
    assert "calls/seed=2,x=7: equal\n1 equal" in "".join(
        line for line in raypipe("replay", "r", "calls/seed=2,x=7").splitlines(True)
        if "compared" not in line
    )  # fmt: skip
    assert content("r") == before


@pytest.mark.parametrize(
    ("before", "after", "column", "status"),
    [
        ("(x - 3) ** 2", "(x - 3) ** 4", "loss", 1),
        ("helper(x) + 1", "(helper(x) + 1) * (1 + 1e-9)", "loss", 0),
        ("random.seed(seed)", "random.seed(seed + 1)", "noise", 1),
        ('f"n{x}"', 'f"m{x}"', "name", 1),
    ],
)
def test_an_edit_is_named_with_the_columns_that_differ(
    name, raypipe, before, after, column, status
):
    raypipe("map", f"{name}:score", "x=0..2", "--run-dir", "r", "--local")
    edit(name, before, after)
    shown = raypipe("replay", "r", expected=status)
    assert f"changed since: code: {name}.py: edited\n" in shown
    columns = {c for c in ("loss", "noise", "name") if f"calls.{c} " in shown}
    assert columns == {column}
    if not status:
        assert "within the tolerance: calls.loss by up to 1e-09 (stored" in shown
        raypipe("replay", "r", "--tolerance", "1e-12", expected=1)
    assert "3 equal" in raypipe("replay", "r", "--kept-code")
    assert rp.replay("r").is_equal == (status == 0)
    edit(name, after, before.replace("(x - 3) ** 2", "1 / x"))
    if "- 3" in before:
        shown = raypipe("replay", "r", expected=1)
        assert "calls/x=0: failed: calls: calls/x=0: error: ZeroDivisionError" in shown
        assert "calls/x=1: differs" in shown


def test_what_is_not_recorded_is_said_to_decide(name, raypipe, monkeypatch):
    edit(name, "    random.seed(seed)\n", "")
    raypipe("map", f"{name}:score", "x=0..2", "--run-dir", "r", "--local")
    shown = raypipe("replay", "r", expected=1)
    assert (
        "changed since: nothing that is recorded; does a seed decide all that is random?" in shown
    )
    other = {**environment_row(), "numpy": "9.9"}
    monkeypatch.setattr(command, "environment_row", lambda: other)
    shown = raypipe("replay", "r", expected=1)
    (line,) = [line for line in shown.splitlines() if line.startswith("changed since")]
    assert line == f"changed since: numpy: {environment_row()['numpy']} -> 9.9"


def test_units_of_earlier_commands_and_code_are_found(name, raypipe):
    raypipe("map", f"{name}:score", "x=0..1", "--run-dir", "r", "--local", "--version", "1")
    edit(name, "helper(x) + 1", "helper(x) + 20")
    raypipe("map", f"{name}:score", "x=5..6", "--run-dir", "r", "--local", "--version", "1")
    found = rp.replay("r", every=True)
    outcomes = {each.unit: each.outcome for each in found.units}
    assert outcomes == {
        "calls/x=5": "equal",
        "calls/x=6": "equal",
        "calls/x=0": "differs",
        "calls/x=1": "differs",
    }
    assert found.changes == (f"code: {name}.py: edited",)
    assert rp.replay("r", ["calls/x=0"], kept_code=True).is_equal
    shown = raypipe("show", "r", "--code")
    first, second = shown.split("\ncode ")
    assert "2 units: calls/x=0, calls/x=1\n" in first
    assert MODULE in first
    assert "2 units: calls/x=5, calls/x=6\n" in second
    assert '-    return {"loss": helper(x) + 1,' in second
    assert '+    return {"loss": helper(x) + 20,' in second


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calls/x=00"], "has no stored unit 'calls/x=00'; did you mean calls/x=0?"),
        (["--tolerance", "1"], "tolerance"),
    ],
)
def test_mistakes_start_nothing(name, raypipe, words, message):
    raypipe("map", f"{name}:score", "x=0..2", "--run-dir", "r", "--local")
    assert message in raypipe("replay", "r", *words, expected=2)


def test_functions_of_notebooks_and_code_in_run_directories_are_refused(name, raypipe):
    rp.map(lambda x: {"y": x}, {"x": [1, 2]}, run_dir="n", local=True)
    assert "only functions of modules can be replayed" in raypipe("replay", "n", expected=2)
    raypipe("map", f"{name}:score", "x=0..2", "--run-dir", "r", "--local")
    Path(f"{name}.py").rename(f"r/{name}.py")
    os.chdir("r")
    assert "would be imported from the run directory" in raypipe("replay", ".", expected=2)


@pytest.mark.parametrize("matrix", [[], ["--matrix", "train.training.learning_rate=[0.01,0.02]"]])
def test_a_training_and_the_stages_after_it(name, raypipe, matrix):
    Path(f"{name}.py").write_text(TRAINING)
    Path("c.yaml").write_text(CONFIG.format(name=name))
    raypipe("run", "c.yaml", "--run-dir", "r", "--local", *matrix)
    before, units = content("r"), 6 if matrix else 3
    shown = raypipe("replay", "r", "--all")
    assert shown.splitlines()[-1] == f"{units} equal"
    assert "trials.step_time_s" in shown
    assert "steps.samples_per_s" in shown
    edit(name, "return found", "return type(found)(found.total * 2, found.weight)")
    shown = raypipe("replay", "r", "train", expected=1)
    line = next(line for line in shown.splitlines() if ": differs: " in line)
    assert line.startswith("train")
    assert "trials.loss_final by up to" in line
    assert "steps.loss by up to" in line
    assert f"changed since: code: {name}.py: edited\n" in shown
    shown = raypipe("replay", "r", "probe", "total")
    assert shown.splitlines()[-1] == f"{units // 3 * 2} equal"
    edit(name, '"mine", 1', '"mine", 20')
    shown = raypipe("replay", "r", "train", expected=1)
    assert ": changed: cannot be computed as it was: version: stored 1, now 20" in shown
    assert content("r") == before


def test_the_code_is_kept_without_secrets_and_in_bounds(name, raypipe, folder):
    secret = 'API_KEY = "KEY77"\nlogin(password="KEY78", url="s3://KEY79:KEY80@host/x")\n'
    source = f"from other import login\nimport big\n{secret}{MODULE}"
    (folder / "other.py").write_text('def login(**_):\n    """Do nothing."""\n')
    noise = "".join(os.urandom(1000).hex() for _ in range(2500))
    (folder / "big.py").write_text(f'DATA = "{noise}"\n')
    (folder / f"{name}.py").write_text(source)
    raypipe("map", f"{name}:score", "x=1", "--run-dir", "r", "--local")
    (path,) = Path("r/code").iterdir()
    assert path.stat().st_size < 2**21
    with ZipFile(path) as archive:
        names = archive.namelist()
        kept = b"".join(map(archive.read, names))
    assert sorted(names) == sorted([f"{name}.py", "other.py"])
    assert b"KEY" in kept
    assert all(f"KEY{number}".encode() not in kept for number in (77, 78, 79, 80))
    assert "not kept, too large: big.py" in raypipe("show", "r", "--code")
    shown = raypipe("replay", "r", "--kept-code", expected=2)
    assert "its kept code is not complete" in shown
    assert "1 equal" in raypipe("replay", "r")


def test_commit_and_changed_files_are_kept(name, raypipe, folder):
    import subprocess

    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], cwd=folder, check=True)
    edit(name, "(x - 3) ** 2", "(x - 3) ** 4")
    raypipe("map", f"{name}:score", "x=1", "--run-dir", "r", "--local")
    shown = raypipe("show", "r", "--code")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert f"commit {commit.stdout.strip()}; what files differ is in changes.diff" in shown
    assert "-    return (x - 3) ** 2\n+    return (x - 3) ** 4\n" in shown


def test_a_damaged_archive_is_one_message(name, raypipe):
    raypipe("map", f"{name}:score", "x=1", "--run-dir", "r", "--local")
    (path,) = Path("r/code").iterdir()
    path.write_bytes(path.read_bytes()[:-30])
    assert f"{path.name}: is damaged (" in raypipe("show", "r", "--code", expected=2)
    with ZipFile(path, "w") as archive:
        archive.writestr("../../evil.py", "")
    assert "lie outside of it" in raypipe("show", "r", "--code", expected=2)


def test_a_run_on_object_storage_is_replayed(name, raypipe, folder, remote, monkeypatch):
    raypipe("map", f"{name}:score", "x=0..2", "--run-dir", "r", "--local")
    arrow_fs.copy_files(str(folder / "r"), str(folder / "remote"))
    monkeypatch.setattr(command, "opened", lambda _: remote)
    found = rp.replay("bucket://run", every=True)
    assert [each.outcome for each in found.units] == ["equal"] * 3, str(found)
    (fingerprint,) = (key for key, _ in Ledger(remote, writable=False).items("code"))
    assert kept_code(remote, fingerprint) == {f"{name}.py": MODULE}


MATRIX = ("--matrix", "parameters.factor=[1,1.1]", "--matrix", "runs=2")


@pytest.mark.parametrize(("matrix", "units"), [((), 1), (MATRIX, 4)], ids=["alone", "matrix"])
def test_a_script_is_equal_until_an_edit_that_is_named(script, raypipe, matrix, units):
    raypipe("run", script, "--run-dir", "r", "--local", *matrix)
    before = content("r")
    shown = raypipe("replay", "r", "--all")
    assert count(shown) == f"{units} equal"
    assert "trials.step_time_s" in shown
    assert "changed since" not in shown
    edit("steps", "(1 - rate)", "(1 - 2 * rate)")
    shown = raypipe("replay", "r", "--all", expected=1)
    assert shown.count("steps.loss by up to 0.") == units
    assert shown.count("trials.eval_loss by up to 0.") == units
    assert "\nchanged since: code: steps.py: edited\n" in shown
    assert count(shown) == f"{units} differs"
    assert count(raypipe("replay", "r", "--all", "--kept-code")) == f"{units} equal"
    assert content("r") == before


def test_a_script_that_ran_on_a_cluster_is_replayed_here(script, launcher, raypipe):
    ended = in_process(launcher, "run", script, "--run-dir", "r", environment={})
    assert ended.status == 0, ended.output
    assert count(raypipe("replay", "r")) == "1 equal"


def test_data_of_a_script_that_changed_are_named(script, raypipe):
    raypipe("run", script, "--run-dir", "r", "--local")
    Path("start.txt").write_text("5.0")
    shown = raypipe("replay", "r", "--all", expected=1)
    assert "train: changed: cannot be computed as it was: files.start.txt: stored '" in shown
    assert "changed since" not in shown  # the line above says it


def test_equal_settings_are_no_equal_results(script, raypipe):
    raypipe("run", script, "--run-dir", "r", "--local", "train.metrics=null")
    assert count(raypipe("replay", "r", expected=1)) == "1 nothing to compare"


def test_the_script_that_ran_is_kept_and_not_the_one_that_failed(script, raypipe):
    edit("steps", "loss * (1 - rate)", "loss / 0")
    raypipe("run", script, "--run-dir", "r", "--local", expected=1)
    edit("steps", "loss / 0", "loss / 2")
    raypipe("run", script, "--run-dir", "r", "--local")
    first, second = raypipe("show", "r", "--code").split("\ncode ")
    assert "1 units: hardware\n" in first
    assert "1 units: train\n" in second
    assert "-    return loss / 0\n+    return loss / 2\n" in second
    assert count(raypipe("replay", "r", "train", "--kept-code")) == "1 equal"


def test_kept_code_of_a_package_runs_beside_what_is_not_kept(name, raypipe, folder):
    package = folder / f"{name}_package"
    package.mkdir()
    for file in ("__init__.py", "unused.txt"):
        (package / file).write_text("")
    (folder / f"{name}.py").rename(package / "inner.py")
    (folder / "scale.txt").write_text("3")
    edit(f"{package}/inner", "return (x - 3)", "return (x - float(open('scale.txt').read()))")
    raypipe("map", f"{package.name}.inner:score", "x=0..2", "--run-dir", "r", "--local")
    edit(f"{package}/inner", ") ** 2", ") ** 4")
    before = {path: path.stat().st_mtime_ns for path in package.iterdir() if path.is_file()}
    assert count(raypipe("replay", "r", "--kept-code")) == "3 equal"
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert "inner.py: edited\n" in raypipe("replay", "r", expected=1)


def test_points_of_a_search_and_what_they_share(folder, raypipe):
    (folder / "hill.py").write_text(HILL)
    (folder / "c.yaml").write_text(SEARCH.replace("trials: 12", "trials: 3"))
    raypipe("run", "c.yaml", "--run-dir", "r", "--local")
    assert count(raypipe("replay", "r", "--all")) == "1 nothing to compare, 6 equal"
    assert count(raypipe("replay", "r", "judge")) == "3 equal"
    edit("hill", "2 * row", "3 * row")
    shown = raypipe("replay", "r", "--all", expected=1)
    assert shown.count("measures.value by up to 0.33") == 3
    assert "changed since: code: hill.py: edited\n" in shown
    assert count(shown) == "1 nothing to compare, 3 equal, 3 differs"


def test_trials_of_a_sweep_are_not_replayed(script, raypipe):
    axes = "sweep={stage: train, kind: quality, axes: {training.learning_rate: [0.1, 0.2]}}"
    raypipe("run", script, axes, "--run-dir", "r", "--local", "--only", "sweep")
    for words in ([], ["--all"], ["sweep"]):
        shown = raypipe("replay", "r", *words, expected=2)
        assert "r: the trials of a sweep are not replayed, since they measure speed" in shown
        assert shown.count("\n") == 1
    raypipe("run", script, axes, "--run-dir", "r", "--local")
    shown = raypipe("replay", "r")
    assert "5 stored units, 3 of a sweep left out\n" in shown
    assert count(shown) == "1 equal"
    raypipe("replay", "r", "train", "sweep", expected=2)


def test_a_unit_that_failed_has_nothing_to_compare(name, raypipe):
    edit(name, "(x - 3) ** 2", "1 / (x - 2)")
    raypipe("map", f"{name}:score", "x=0..3", "--run-dir", "r", "--local", expected=1)
    shown = raypipe("replay", "r", "calls/x=2", expected=2)
    assert "r: calls/x=2: has no result to compare, since it failed (error: ZeroDiv" in shown
    assert count(raypipe("replay", "r", "--all")) == "3 equal"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_leaves_nothing(name, raypipe, folder, number):
    raypipe("map", f"{name}:score", "x=0..1", "--run-dir", "r", "--local")
    before = content("r")
    edit(name, "random.seed(seed)", "open('began', 'w').close(); import time; time.sleep(60)")
    (folder / "tmp").mkdir()
    environment = {"TMPDIR": str(folder / "tmp"), "RAYPIPE_CACHE": str(folder / "cache")}
    with start(folder, "replay", "r", environment=environment) as process:
        while not Path("began").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert list((folder / "tmp").iterdir()) == []
    assert content("r") == before
