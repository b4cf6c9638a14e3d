"""References to functions: importing them, and the code behind them."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from raypipe.errors import ConfigError
from raypipe.functions import reference

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


def test_a_function_is_found_by_its_name(module):
    function = reference.load(f"{module}:score", "here")
    assert function(2) == {"y": 4}
    assert reference.of_function(function) == f"{module}:score"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{}", "must be MODULE:FUNCTION"),
        ("{}.py:score", "did you mean {}:score"),
        ("./{}.py:score", "did you mean {}:score"),
        ("./{}:score", "did you mean {}:score"),
        ("below/{}.py:score", "did you mean below.{}:score"),
        ("below/../{}.py", "did you mean {}:FUNCTION"),
        ("../other/{}.py:score", "change to the folder ../other, and give {}:score"),
        ("./{}-2.py:score", "{}-2 is not a name that Python can import: rename the file"),
        ("{}:scor", "no function scor; did you mean score"),
        ("{}:CONSTANT", "is of type int, not a function"),
        ("{}:waits", "is async"),
        ("{}:yields", "yields"),
        ("{}x:score", "move the configuration there; did you mean {}"),
    ],
)
def test_a_wrong_reference_says_what_to_do(module, given, problem):
    with pytest.raises(ConfigError) as raised:
        reference.load(given.format(module), "here")
    assert problem.format(module) in str(raised.value)


@pytest.mark.parametrize("name", ["queue", "sys", "yaml"])
def test_a_module_with_the_name_of_an_imported_one_is_named(module, tmp_path, name):
    (tmp_path / f"{name}.py").write_text("def score(x): return x\n")
    with pytest.raises(ConfigError) as raised:
        reference.load(f"{name}:score", "here")
    used = getattr(sys.modules[name], "__file__", f"the module {name} of Python")
    assert str(raised.value).startswith(f"here: function = {name}: {used} was imported before")
    assert f"rename {name}.py, and give the new name" in str(raised.value)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def f(:", "SyntaxError"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("import surely_not_there", "install it, or correct the name"),
        ("import sys; sys.exit(1)", "SystemExit"),
    ],
)
def test_a_module_that_cannot_be_imported_names_the_line(module, tmp_path, code, problem):
    (tmp_path / f"{module}_bad.py").write_text(f"\n\n{code}\n")
    with pytest.raises(ConfigError) as raised:
        reference.load(f"{module}_bad:f", "here")
    assert problem in str(raised.value)
    assert f"{module}_bad.py" in str(raised.value)
    assert "3" in str(raised.value).rpartition("_bad.py")[2] or "line 3" in str(raised.value)


def test_the_source_covers_modules_next_to_it(module, tmp_path):
    function = reference.load(f"{module}:score", "here")
    before = reference.source(f"{module}:score", function)
    assert set(before.modules) == {module, f"{module}_helper"}
    (tmp_path / f"{module}_helper.py").write_text("def double(x): return 3 * x\n")
    assert reference.source(f"{module}:score", function).changes(before.modules) == [
        f"{module}_helper"
    ]


OFFSET = 1


def helper(x, scale=2):
    return x * scale + OFFSET


def main_like(x):
    return {"y": [helper(each) for each in [x]]}


def source_of(function) -> str:
    return reference.source("__main__:f", function).fingerprint


def test_the_source_of_a_function_without_a_module_covers_what_it_uses(monkeypatch):
    before = source_of(main_like)
    assert source_of(main_like) == before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "OFFSET", 2)
        assert source_of(main_like) != before
    with monkeypatch.context() as patch:
        patch.setattr(helper, "__defaults__", (3,))
        assert source_of(main_like) != before
    assert source_of(main_like) == before
    assert source_of(partial(main_like, x=1)) != source_of(partial(main_like, x=2))


def test_a_closure_and_a_lambda_have_no_importable_reference():
    local = lambda x: x  # noqa: E731
    assert reference.of_function(local).startswith("__main__:")
    assert not reference.is_importable(reference.of_function(local))


#: what a function of a script or notebook uses, before and after a change of its result
CHANGES = {
    "dict": ("C = {'rate': 1}", "C = {'rate': 2}", "C['rate']"),
    "list": ("C = [1]", "C = [2]", "C[0]"),
    "array": ("C = np.ones(2)", "C = np.zeros(2)", "C[0]"),
    "frame": ("C = pd.DataFrame({'a': ['x']})", "C = pd.DataFrame({'a': ['y']})", "C.a[0]"),
    "class": (
        "class C:\n    def value(self): return 1",
        "class C:\n    def value(self): return 2",
        "C().value()",
    ),
    "object": ("C = Plain(); C.x = 1", "C = Plain(); C.x = 2", "C.x"),
    "cached": (
        "@functools.cache\ndef C(): return 1",
        "@functools.cache\ndef C(): return 2",
        "C()",
    ),
    "partial": (
        "def g(x): return x\nC = functools.partial(g, 1)",
        "def g(x): return -x\nC = functools.partial(g, 1)",
        "C()",
    ),
    "helper": ("import MODULE_helper as C", "", "C.double(1)"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_what_a_function_uses_changes_its_source(kind, module, tmp_path, monkeypatch):
    before, after, use = CHANGES[kind]
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(code: str) -> str:
        head = "import functools\nimport numpy as np\nimport pandas as pd\nclass Plain: pass\n"
        names = {"__name__": "__main__"}
        exec(f"{head}{code.replace('MODULE', module)}\ndef f(): return {use}", names)
        return source_of(names["f"])

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
    found = {subprocess.check_output([sys.executable, "-c", code]) for _ in range(3)}
    assert len(found) == 1
