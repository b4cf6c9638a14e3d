"""Python API, as a program and as a notebook use it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import raypipe as rp
from raypipe.api import Best
from raypipe.commands import run as command
from tests.command import finish, spawn
from tests.scenario import cases

CONFIG = cases(__file__, "api")


def half(x, noise=0.0):
    if x == 13:
        raise ValueError("thirteen")
    return {"loss": x / 2 + noise}


def test_map_returns_a_run_whose_table_has_every_call(work):
    run = rp.map(half, {"x": range(3), "noise": np.array([0.0, 0.5])}, cpus=0.5, minimize="loss")
    frame = run.table("calls")
    assert sorted(frame["loss"]) == [0.0, 0.5, 0.5, 1.0, 1.0, 1.5]
    assert list(frame.columns[:4]) == ["call", "x", "noise", "loss"]
    assert run.status == "succeeded"
    assert "calls" in run.tables
    assert len(run.failures) == 0
    assert Path(run.run_dir).parent.name.endswith("half")
    assert f"function: {__name__}:half\n" in Path(run.run_dir, "config.yaml").read_text()
    again = rp.open(run.run_dir)
    assert again == run
    assert "succeeded" in repr(again)
    best = Best("calls.loss", "lower", 0.0, [{"x": 0, "noise": 0.0}], 1, "loss 0 (x=0, noise=0)")
    assert run.best() == run.best("loss") == best
    with pytest.raises(rp.ConfigError, match=r"metric = x: has no finite result \(those with: "):
        run.best("x")
    assert Path(run.report()).is_file()
    with pytest.raises(rp.ConfigError, match="did you mean calls"):
        run.table("cals")
    with pytest.raises(AttributeError, match="no attribute 'maap'"):
        rp.maap  # noqa: B018


def test_a_failed_call_is_an_exception_with_the_run(work):
    with pytest.raises(rp.RunFailedError, match="ValueError: thirteen") as raised:
        rp.map(half, {"x": [1, 13]}, run_dir=work / "r")
    run = raised.value.run
    assert run.status == "failed"
    assert list(run.table("calls")["x"]) == [1]
    assert list(run.failures["unit"]) == ["calls/x=13"]


def test_run_plan_and_overrides_of_a_mapping(work):
    planned = rp.plan(CONFIG, {"train.training.steps": 2})
    assert planned.set_index("stage").loc["train", "workload"] == "2 steps of 8 samples"
    run = rp.run(CONFIG, {"train.training.steps": 2}, profile="cpu", run_dir=work / "r")
    assert list(run.table("trials")["steps"]) == [2]
    again = rp.run(CONFIG, {"train.training.steps": 2}, profile="cpu", run_dir=run.run_dir)
    assert again == run
    done = rp.plan(CONFIG, {"train.training.steps": 2}, profile="cpu", run_dir=run.run_dir)
    assert set(done["to do"]) == {0}
    assert set(done["time"]) == {"done"}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: rp.open("nowhere"), "is not a run directory"),
        (lambda: rp.run("nowhere.yaml"), "no such file"),
        (lambda: rp.run({"experimnt": "x"}), "did you mean experiment"),
        (lambda: rp.run(CONFIG, {"train.trainig.steps": 2}), "did you mean train.training"),
        (lambda: rp.map(half, {"y": 1}), "no argument 'y'"),
        (lambda: rp.map(half, {"x": object()}), "has no stable text"),
        (lambda: rp.map(3, {"x": 1}), "is of type int"),
    ],
)
def test_mistakes_are_exceptions_with_the_text_of_the_command(work, call, problem):
    with pytest.raises(rp.ConfigError, match=problem):
        call()
    assert not (work / "runs").exists()


PROGRAM = """
import importlib, pathlib
import raypipe as rp

def write(factor):
    pathlib.Path("own.py").write_text(f"def f(x): return {{'y': {factor} * x}}\\n")

def called(function):
    run = rp.map(function, {"x": [1]}, cpus=0.5)
    import ray
    return list(run.table("calls")["y"]), ray.get_runtime_context().get_node_id()

def here(x):
    return {"y": factor * x}

def through(x):
    return own.f(x)

write(1)
import own
factor = 2
two, node = called(here)
assert two == [2]
factor = 3
assert called(here) == ([3], node), "a function is sent as it is now, and Ray is used again"
assert called(own.f) == ([1], node)
write(10)
importlib.reload(own)
ten, other = called(own.f)
assert ten == [10] and other != node, "workers import changed modules again"
assert called(through) == ([10], other)
write(100)
importlib.reload(own)
assert called(through)[0] == [100], "so do modules that a function here uses"
print("all is well")
"""


def test_an_edited_experiment_is_imported_again(work):
    code = (
        "from raypipe import Experiment, Settings, Stage\n"
        "class Own(Settings): pass\n"
        "def run(context): context.ledger.put('t', {'a': {'v': VALUE}})\n"
        "EXPERIMENT = Experiment('edited', 1, Own, lambda _: [Stage('t', run)])\n"
    )
    for value in (1, 22):
        (work / "edited_experiment.py").write_text(code.replace("VALUE", str(value)))
        run = rp.run({"experiment": "edited_experiment"}, run_dir=work / f"r{value}")
        assert list(run.table("t")["v"]) == [value]


def test_calls_with_other_values_of_a_variable_are_refused(work):
    def scaled(x):
        return {"y": x * factors["here"]}

    factors = {"here": 2}
    rp.map(scaled, {"x": [1]}, run_dir="r")
    rp.map(scaled, {"x": [1]}, run_dir="r")
    factors["here"] = 3
    with pytest.raises(rp.ConfigError, match="the code changed"):
        rp.map(scaled, {"x": [1]}, run_dir="r")
    lock = threading.Lock()
    with pytest.raises(rp.ConfigError, match="it uses the variable 'lock'"):
        rp.map(lambda x: {"y": lock.locked()}, {"x": 1})


@pytest.mark.slow
def test_a_program_calls_functions_of_its_own_on_one_ray(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    environment = {"RAYPIPE_CACHE": str(tmp_path / "cache")}
    program = spawn(tmp_path, sys.executable, "program.py", environment=environment)
    assert "all is well" in finish(program)


def slow(x):
    time.sleep(x)


def test_a_time_budget_ends_a_call_in_order(tmp_path, monkeypatch):
    """It sends SIGTERM, for which only the command line has a handler."""
    monkeypatch.setattr(command, "_LEAST_RESERVE_S", 3600 - 0.1)
    monkeypatch.setattr(command, "_CUT_S", 3600 - 0.2)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt):
            rp.map(slow, {"x": [0.01, 60]}, local=True, run_dir=tmp_path, time_budget="1h")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert rp.open(tmp_path).status == "interrupted"
    with ThreadPoolExecutor() as threads:
        other = threads.submit(rp.map, slow, {"x": [1]}, local=True, time_budget="1h")
        with pytest.raises(rp.ConfigError, match="main thread"):
            other.result()
