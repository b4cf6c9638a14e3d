"""References to functions: importing them, their arguments, and the code behind them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raypipe.config.axes import values_of
from raypipe.errors import ConfigError
from raypipe.functions import reference
from raypipe.functions.experiment import FunctionSettings, function_experiment
from raypipe.graph.configuration import compose
from tests.scenario import cases

CASES = cases(__file__, "references")
MODULE = """
import os
import {other}

def score(x):
    return {{"y": {other}.double(x)}}

async def waits(x): ...
def yields(x): yield x
CONSTANT = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """A module in the current directory that imports another one next to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}_helper.py").write_text("def double(x): return 2 * x\n")
    (tmp_path / f"{name}.py").write_text(MODULE.format(other=f"{name}_helper"))
    yield name
    for each in [each for each in sys.modules if each.startswith(name)]:
        del sys.modules[each]


@pytest.mark.parametrize(("given", "problem"), CASES["wrong"].items())
def test_a_wrong_reference_says_what_to_do(module, given, problem):
    with pytest.raises(ConfigError) as raised:
        reference.load(given.format(module), "here")
    assert problem.format(module) in str(raised.value)


@pytest.mark.parametrize("kind", CASES["changes"])
def test_a_change_of_what_a_function_uses_changes_its_source(kind, module, tmp_path, monkeypatch):
    change = CASES["changes"][kind]
    before, after, use = change["before"], change.get("after"), change["use"]
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(code: str) -> str:
        head = "import functools\nimport numpy as np\nimport pandas as pd\nclass Plain: pass\n"
        names = {"__name__": "__main__"}
        exec(f"{head}{code.replace('MODULE', module)}\ndef f(): return {use}", names)
        return reference.source("__main__:f", names["f"]).fingerprint

    first = hashed(before)
    assert hashed(before) == first
    if not after:
        (tmp_path / f"{module}_helper.py").write_text("def double(x): return 3 * x\n")
    assert hashed(after or before) != first


def test_the_source_of_a_function_is_the_same_in_every_process():
    code = (
        "import logging\nfrom raypipe.functions import reference\nlog = logging.getLogger('x')\n"
        "class A: pass\n"
        "def f(x, a=A()): return log, x in {'alpha', 'beta', 'gamma', 'delta'}\n"
        "print(reference.source('__main__:f', f).fingerprint)"
    )
    environments = ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    found = {subprocess.check_output([sys.executable, "-c", code], env=e) for e in environments}
    assert len(found) == 1


@pytest.mark.parametrize(("value", "expected"), CASES["ranges"])
def test_a_range_includes_both_ends_and_other_texts_are_single_values(value, expected):
    values = values_of(value)
    assert (values and list(values)) == expected


def anything(**settings): ...


def test_the_units_of_a_million_calls_are_made_when_they_are_asked_for():
    values = FunctionSettings(arguments={"x": "0..99999", "y": [1, "a", "b"], "z": [3, 4, None]})
    experiment = function_experiment("m:anything", anything, values)
    (found,) = compose(experiment, values, experiment.stages(values))
    assert len(found.units) == 900_000
    first, last = found.units[0], found.units[-1]
    assert (first.key, last.key) == ("calls/x=0,y=1,z=3", "calls/x=99999,y=b,z=null")
    even = found.units[:6].where(lambda unit: unit.literals["arguments"]["z"] == 4)
    assert [unit.key for unit in even] == ["calls/x=0,y=1,z=4", "calls/x=0,y=a,z=4"]
    assert even[1].fingerprint == found.units[4].fingerprint
