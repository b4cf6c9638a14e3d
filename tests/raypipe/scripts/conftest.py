"""A script without torch, and commands on it in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.commands import cluster
from raypipe.launch.inline import InlineLauncher
from tests import command
from tests.command import Ended

#: trains the square root of 2, and fails as its arguments say
SCRIPT = """
import argparse, json, os, pathlib, signal, sys, time
defaults = {"batch": 1, "accum": 1, "lr": 0.1, "steps": 10, "precision": "fp32", "out": "."}
defaults |= {"checkpoints": "", "fits": 10**9, "pause": 0.01, "fail": ""}
p = argparse.ArgumentParser()
p.add_argument("--resume", action="store_true")
for name, value in defaults.items():
    p.add_argument(f"--{name}", type=type(value), default=value)
a = p.parse_args()
if a.batch > a.fits:
    sys.exit("Traceback (most recent call last):\\n  File 'train.py', line 1, in <module>\\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 79.11 GiB of which 1.06 GiB is free.")
x, start = 1.0, 0
saved = pathlib.Path(a.checkpoints, "state.json")
if a.resume:
    x, start = json.loads(saved.read_text())
log = open(pathlib.Path(a.out, "metrics.jsonl"), "a")
for step in range(start, a.steps):
    x -= a.lr * 4 * x * (x * x - 2) / 8
    loss = (x * x - 2) ** 2 if a.fail != "nan" else float("nan")
    print(json.dumps({"step": step + 1, "loss": loss, "batch": a.batch}), file=log, flush=True)
    if a.checkpoints and (step + 1) % 4 == 0:
        saved.write_text(json.dumps([x, step + 1]))
    if a.fail == "kill" and step == 5 and not a.resume:
        os.kill(os.getpid(), signal.SIGKILL)
    if a.fail == "raise" and step == 5:
        raise ValueError("the data ends here")
    if a.fail == "hang" and step == 5 and not a.resume:
        time.sleep(600)
    time.sleep(a.pause)
print(json.dumps({"step": a.steps, "eval/accuracy": 0.75}), file=log, flush=True)
pathlib.Path(a.out, "model.txt").write_text(repr(x))
"""
COMMAND = (
    "python train.py --batch {micro_batch} --accum {accumulation} --lr {learning_rate} "
    "--steps {steps} --out {output_dir} --checkpoints {checkpoint_dir} {resume}"
)


@pytest.fixture
def folder(folder: Path) -> Path:
    """The working directory, with the script."""
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def raypipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Return a function that runs a command on a configuration of the script, without Ray."""

    def run(verb: str, *arguments: str, extra: str = "", **train: Any) -> Ended:
        write_configuration(folder, extra, **train)
        launcher = InlineLauncher()
        monkeypatch.setattr(cluster, "attach", lambda *_: None)
        placed = () if verb == "fit" or "--run-dir" in str(arguments) else ("--run-dir", "run")
        return command.in_process(launcher, verb, "c.yaml", *placed, *arguments, environment={})

    return run


def write_configuration(folder: Path, extra: str = "", **train: Any) -> None:
    """Write ``c.yaml``; the command gets the arguments ``extra``, the section the rest."""
    parameters = train.pop("parameters", {})
    more = {key: train.pop(key) for key in ("matrix", "sweep") if key in train}
    given = {
        "command": f"{COMMAND} {extra}",
        "metrics": "metrics.jsonl",
        "resume": "--resume",
        **train,
    }
    training = {"steps": 12, "micro_batch": 4, "accumulation": 2}
    given["training"] = {**training, **given.get("training", {})}
    content = {"experiment": "raypipe.scripts", "parameters": parameters, "train": given, **more}
    (folder / "c.yaml").write_text(yaml.safe_dump(content))
