"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

# pytest would rewrite the assertions of all modules of this plugin, in each process
_finders = [each for each in sys.meta_path if type(each).__name__ != "AssertionRewritingHook"]
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(sys, "meta_path", _finders)
    from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from raypipe.launch.cluster import RayLauncher
    from raypipe.store.run_directory import RunDirectory

# tests, workers and commands share the cores; read when torch and numpy are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a training takes all cores, and its threads would spin while they wait for each other: in tests,
# several times as long as they compute
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# commands fit their tables to it, and the processes of pytest-xdist have one
os.environ.pop("COLUMNS", None)

# Ray's processes wait for each other, on a busy machine longer than the minute after which they
# end; that one is killed is still seen at once
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
os.environ.setdefault("RAY_health_check_timeout_ms", "120000")

# how long an example takes hangs on what else the machine does
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# nothing of what the tests import is garbage: `pytest_collection` ends this
gc.disable()

# a shell's background job ignores Ctrl-C, and so would every process that a test starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PROJECT = Path(__file__).resolve().parents[1]
#: the fast tests on the shared Ray cluster, which one process runs
ON_RAY = (
    *(
        f"tests/raypipe/launch/test_{name}.py"
        for name in ("beside", "nodes", "pool", "start", "train", "tune")
    ),
    "tests/raypipe/functions/test_isolation.py",
    "tests/raypipe/scripts/test_script_on_ray.py",
    "tests/raypipe/test_cli.py::test_a_run_continues_with_and_without_ray",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a fast test on the shared Ray cluster that would start another one."""
    for item in items:
        on_ray = "launcher" in getattr(item, "fixturenames", ())
        if on_ray and not item.get_closest_marker("slow") and not item.nodeid.startswith(ON_RAY):
            raise pytest.UsageError(f"{item.nodeid}: uses `launcher`; name its file in ON_RAY")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Compile the topic model of a fresh clone in one process; the others load what it compiled.

    Python collects no garbage before the end, and never what is there then.
    """
    kernels = "experiments.pabbo_lda.objective.variational_bayes"
    folder = PROJECT.joinpath(*kernels.split(".")).parent
    with FileLock(folder / "__pycache__/tests.lock"):
        if not any(folder.glob("__pycache__/*.nbi")):
            import_module(kernels)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, and those on Ray, so that its cluster starts once."""
    from xdist.scheduler import LoadFileScheduling

    class RayAndFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # by name: what xdist 3.8 adds to the names of a group is lost in pytest 9.2
            return "ray" if nodeid.startswith(ON_RAY) else super()._split_scope(nodeid)

    return RayAndFiles(config, log)


@pytest.fixture(scope="session", autouse=True)
def _collect_what_is_new() -> Iterator[None]:
    """Every training collects garbage, to measure its own memory: since the last time only."""
    collect = gc.collect

    def collect_and_freeze(generation: int = 2) -> int:
        found = collect(generation)
        gc.freeze()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", collect_and_freeze)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect(_collect_what_is_new: None) -> None:
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _no_sync() -> Iterator[None]:
    """A command waits for the disk hundreds of times, and no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


def _empty_page(run: RunDirectory, *_: object) -> str:
    path = f"{run.report}/index.html"
    run.write(path, b"")
    return path


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an empty report in this process, unless a test or case asks: it is half of the time."""
    case = getattr(getattr(request.node, "callspec", None), "params", {}).get("case")
    asked = isinstance(case, dict) and "report" in case
    if not asked and "report" not in request.fixturenames:
        monkeypatch.setattr("raypipe.report.page.build", _empty_page)


def _print_nothing(canvas: Any, *_: object, **__: object) -> None:
    if "draw" in vars(canvas.figure):  # replaced, by who asks for the renderer alone
        canvas.figure.draw(canvas.get_renderer())


@pytest.fixture(scope="module", autouse=True)
def _no_pixels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw figures as SVG only, but in the tests of plots: each is drawn once instead of twice."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_plots.py":
            canvas = "matplotlib.backends.backend_agg.FigureCanvasAgg"
            patch.setattr(f"{canvas}.print_png", _print_nothing)
        yield


@pytest.fixture
def report() -> None:
    """Commands write their report, as users' do."""


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real corpora, or a skip where this machine has none."""
    folder = Path(os.environ.get("RAYPIPE_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("real data not found: set RAYPIPE_DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLauncher]:
    """One Ray cluster for all tests that need one, but none of their own."""
    from raypipe.launch.cluster import RayLauncher
    from tests.command import EXAMPLES

    here = Path.cwd()
    assert here == PROJECT, f"run the tests from {PROJECT}"
    with pytest.MonkeyPatch.context() as patch:  # its workers keep the environment of now
        patch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)
        patch.setenv("RAYPIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        launcher = RayLauncher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def address(launcher: RayLauncher) -> str:
    """Where commands in processes of their own find that cluster."""
    import ray

    return str(ray.get_runtime_context().gcs_address)
