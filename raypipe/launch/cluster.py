"""Ray launcher: connect to a cluster or start one on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any

import psutil
import ray

from raypipe import hardware, import_path
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.launcher import Control, PoolOptions, R, TaskPool
from raypipe.launch import ENVIRONMENT, ZERO_GPUS, in_cluster
from raypipe.launch.nodes import answers, living_nodes
from raypipe.launch.pool import RayPool
from raypipe.store.run_directory import RunDirectory
from raypipe.training.job import Report, TrainingJob

if TYPE_CHECKING:
    from raypipe.study.sweep import Sweep

#: variable of Ray: a cluster to use
_ADDRESS = "RAY_ADDRESS"
#: bytes of a folder for Ray's sockets, whose names in it take 68 of the 107 that Linux allows
_LONGEST_FOLDER = 39
#: key among the imported modules: raypipe has started Ray, and not the user's program
_STARTED_HERE = ":started"
# seconds between looks at the raylet, and for work to end after its death
_LOOK_S, _END_S = 0.5, 5.0


#: hashes of the modules that workers may have imported, of the Ray that raypipe started here; it
#: goes on between calls
_imported: dict[str, str] = {}


class RayLauncher(Control):
    """Launcher on a Ray cluster: the one around this process, one at an address, or a local one.

    It controls all work that it runs.

    Raises:
        ConfigError: no cluster can be reached at the address.
        UnitError: Ray does not start here.

    """

    concurrent = True

    def __init__(
        self, address: str | None = None, modules: Mapping[str, str] | None = None
    ) -> None:
        self._local = address is None and not in_cluster()
        super().__init__()
        #: of the trainings; started with the first one
        self._mailbox: Any = None
        self._one_mailbox = Lock()
        if not (self._local and modules is not None and _is_kept(modules)):
            # a job passes its own variables on to its workers; the search path includes the job's
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
            if not isinstance(sys.stdout, _WithoutRay):
                sys.stdout = _WithoutRay(sys.stdout)
            if self._local:
                _start()
            else:
                _connect(address)
        self.nodes = tuple(living_nodes().values())
        if self._local:
            self._watch_raylet()

    def on_every_node(self, function: Callable[[], R]) -> list[R]:
        """Call a function in a task on each living node, and return the results.

        The task sees the GPUs of its node. Nodes that die meanwhile are skipped. On a cluster that
        was started here, it is this process that calls the function.

        Raises:
            ConfigError: no node is alive.

        """
        if self._local:
            return [function()]
        sees_gpus = {"env_vars": {ZERO_GPUS: "0"}}
        results = answers(living_nodes(), function, runtime_env=sees_gpus)
        if not results:
            raise ConfigError("no node of the Ray cluster is alive; start one, or use another")
        return results

    def train(
        self, job: TrainingJob, report: Report, started: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Run a training job in a task, which is or starts its workers. Raises UnitError.

        The outcome has the seconds that the workers lasted, and of CPUs and GPUs that they held.
        """
        from raypipe.launch.training import fit, start_mailbox  # torch takes seconds to import

        with self._one_mailbox:
            self._mailbox = self._mailbox or start_mailbox()
        return fit(job, report, lambda _: started(), self._mailbox, self)

    def trials(self, sweep: Sweep, run: RunDirectory) -> None:
        """Run the trials of a sweep on Ray Tune."""
        from raypipe.launch.trials import run_trials  # slow to import, and seldom needed

        self.pause()
        run_trials(sweep, run, self)

    @contextmanager
    def pool(self, options: PoolOptions, say: Callable[[str], None] = print) -> Iterator[TaskPool]:
        """Return a pool of fractional-CPU tasks. Raises ConfigError."""
        pool = RayPool(options, self, say)
        with self.working():
            try:
                yield pool
            finally:
                pool.cancel()

    def _watch_raylet(self) -> None:
        """Let all work fail once the raylet that was started here dies.

        Ray ends this process without a word ten seconds later, so it is left before.
        """
        raylet = _raylet()

        def watch() -> None:
            while raylet is not None and _lives(raylet):
                time.sleep(_LOOK_S)
            if raylet is None or not ray.is_initialized() or _raylet() is not None:
                return  # not started here, stopped in order, or started again
            self.interrupt(
                "Ray's process on this machine (raylet) died: somebody killed it, or the system "
                "did, for lack of memory"
            )
            deadline = time.monotonic() + _END_S
            while not self.is_at_rest and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            if _raylet() is None:
                ray.shutdown()

        Thread(target=watch, name="raylet", daemon=True).start()

    def close(self) -> None:
        """Disconnect from the cluster; stop it if it was started here."""
        ray.shutdown()
        if isinstance(sys.stdout, _WithoutRay):
            sys.stdout = sys.stdout.stream


def _raylet() -> psutil.Process | None:
    """Return the living raylet that this process has started, if any."""
    return next(filter(_lives, psutil.Process().children()), None)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended meanwhile
        return bool(process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE)
    return False


class _WithoutRay:
    """Standard output without what Ray's threads print: a paragraph per dead worker.

    Each death is a row in `failures`, and ``log_to_driver`` does not cover these paragraphs.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text unless Ray prints it."""
        if current_thread().name.startswith("ray_"):
            return len(text)
        return int(self.stream.write(text))


def _is_kept(modules: Mapping[str, str]) -> bool:
    """Whether this process has Ray, and its workers have not imported other source code.

    Ray is stopped otherwise, since workers do not import a module twice.

    Raises:
        ConfigError: the user's program started that Ray.

    """
    # a function of no module, `__main__:name`, is sent with each run
    modules = {name: digest for name, digest in modules.items() if ":" not in name}
    changed = [n for n, digest in modules.items() if _imported.get(n, digest) != digest]
    if changed and ray.is_initialized():
        if _STARTED_HERE not in _imported:
            raise ConfigError(
                f"{', '.join(changed)}: changed since workers of the Ray that this program started "
                "imported it; call ray.shutdown() first"
            )
        ray.shutdown()
    if not ray.is_initialized():
        _imported.clear()
        _imported[_STARTED_HERE] = ""
    _imported.update(modules)
    return ray.is_initialized()


def _start() -> None:
    """Start Ray on this machine. Raises UnitError."""
    here = hardware.detect()
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": here.cpus}
    # Ray counts cards, also lost ones, and not the slices of MIG
    options["num_gpus"] = len(here.gpus)
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:  # as SLURM sets TMPDIR
        options["_temp_dir"] = "/tmp/ray"
    # its processes inherit them; Ray takes half a second per process to apply a runtime_env
    variables = {import_path.VARIABLE: import_path.of_workers()}
    if here.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in here.gpus)
    _provide_token()
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        _init(address="local", **options)
    except Exception as error:  # Ray raises anything, even a plain Exception
        ray.shutdown()
        lost = f" ({'; '.join(here.gpu_problems)}; --local works)" if here.gpu_problems else ""
        reason = f"Ray does not start on this machine: {error}{lost}"
        raise UnitError("ray.init", "node_lost", reason) from error
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _connect(address: str | None) -> None:
    """Connect to the cluster at an address, else that of the environment. Raises ConfigError."""
    variables = {import_path.VARIABLE: import_path.of_workers()}
    # Python's own variable brings raypipe itself, if it is not installed on the nodes
    variables |= {k: os.environ[k] for k in ("PYTHONPATH", *ENVIRONMENT) if k in os.environ}
    given = address or os.environ.get(_ADDRESS, "")
    named = f"--address {given}" if address else f"{_ADDRESS}={given}"
    host, _, port = given.rpartition("://")[2].rpartition(":")
    try:
        if host and port.isdigit():  # else "auto", or a name that Ray resolves
            # fail at once if nothing listens; Ray would retry for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        _init(address=address or "auto", runtime_env={"env_vars": variables})
    except Exception as error:  # Ray raises anything, even a plain Exception
        advice = "" if address else f"; start it, or unset {_ADDRESS}"
        raise ConfigError(
            f"{named}: no Ray cluster can be reached there: {error}{advice}"
        ) from error


def _init(**options: Any) -> None:
    """Call ``ray.init``, which replaces the handler of SIGTERM, and keep that."""
    is_main = current_thread() is main_thread()  # Python sets handlers in the main thread only
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit as error:  # raised by that handler
        raise KeyboardInterrupt from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)


def _provide_token() -> None:
    """Give Ray a token in the environment if it cannot keep one in ``~/.ray``."""
    with suppress(OSError, RuntimeError):  # read-only, or no home at all
        folder = Path.home() / ".ray"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) or (folder / "auth_token").is_file():
            return
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
