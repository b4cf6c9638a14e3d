"""What the commands do; ``cli`` only parses their arguments."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml

from raypipe import faults, hardware, tracking
from raypipe.config import configuration as config
from raypipe.config.configuration import Configuration
from raypipe.errors import ConfigError, UnitError
from raypipe.hardware import Hardware
from raypipe.launch import in_cluster, in_job
from raypipe.pipeline.context import Session
from raypipe.pipeline.experiment import Stage, in_order, with_needs
from raypipe.pipeline.progress import Display
from raypipe.pipeline.runner import all_stored, refuse_changes, run_stages
from raypipe.redaction import hidden_override, without_credentials, without_secrets
from raypipe.storage.ledger import Ledger, Row
from raypipe.storage.lock import LostLeaseError, writing
from raypipe.storage.run_directory import RunDirectory, cache_directory
from raypipe.storage.tables import single_tables
from raypipe.sweep.fit import fit_stage, fitting
from raypipe.sweep.presets import published
from raypipe.sweep.recommendation import snippet
from raypipe.sweep.stage import NAME as SWEEP
from raypipe.sweep.stage import with_sweep
from raypipe.tracking import open_trackers

if TYPE_CHECKING:
    from raypipe.pipeline.launcher import Launcher

RUNS = "RAYPIPE_RUNS"
#: an entry of the ledger: whether tables and report show all that is stored
_SHOWN = "shown"


@dataclass(frozen=True)
class Request:
    """What the user asked a command to do, as given."""

    command: str
    path: str
    overrides: Sequence[str] = ()
    run_dir: str | None = None
    profile: str = "auto"
    only: Sequence[str] = ()
    address: str | None = None
    write: str | None = None

    def again(self, run: RunDirectory) -> str:
        """The command that continues in a run directory, without secrets."""
        shown = replace(self, overrides=[hidden_override(each) for each in self.overrides])
        return without_credentials(shlex.join(shown.words(run)))

    def words(self, run: RunDirectory) -> list[str]:
        """The command, word by word."""
        parts = ["raypipe", self.command, self.path, *self.overrides, "--run-dir", run.location]
        if self.profile != "auto":
            parts += ["--profile", self.profile]
        for name in self.only if self.command == "run" else ():
            parts += ["--only", name]
        if self.address is not None:
            parts += ["--address", self.address]
        return parts


def run(request: Request) -> int:
    """``raypipe run``: 0 when all is done, 1 when a stage failed, 130 when interrupted."""
    document = config.read(request.path)
    faults.from_environment()
    cache_directory()  # a mistake in its name shows before anything starts
    from raypipe.report.build import build

    with ExitStack() as stack:
        launcher = _attach(request.address, stack)
        nodes = launcher.on_every_node(hardware.detect) if launcher else [hardware.detect()]
        configuration = config.resolve(document, request.overrides, request.profile, nodes)
        stages = stages_of(configuration, request.only, nodes)
        _check_training(configuration, nodes)
        run = _run_directory(request.run_dir, configuration)
        fresh = not run.exists(run.ledger)
        stored = Ledger(run, writable=False)
        _refuse_another(stored, configuration, run)
        tracking.check(configuration.settings.tracking, run)
        refuse_changes(stored, stages, run.shown)
        print(f"run directory: {run.shown}", flush=True)
        if not fresh and all_stored(stages, stored) and _is_shown(run, stored):
            print("nothing to do: everything this configuration asks for is stored", flush=True)
            _recommend(request, configuration, stored)
            return 0
        del stored  # what is stored is read again as the only writer, and may be large
        check = stack.enter_context(writing(run, lambda text: print(text, flush=True)))
        display = stack.enter_context(Display())
        again = request.again(run)
        try:
            ledger = Ledger(run, before_writing=check)
            _refuse_another(ledger, configuration, run)  # as another command may have left it
            refuse_changes(ledger, stages, run.shown)
            text = yaml.safe_dump(without_secrets(configuration.resolved()), sort_keys=False)
            run.write(run.config, text.encode())
            ledger.put("runs", {_SHOWN: {"all": False}})
            _announce(display, configuration, nodes)
            if launcher is None:
                launcher = _start(stack)
            run_id, name = _run_id(ledger, configuration), configuration.experiment.name
            trackers = stack.enter_context(
                open_trackers(
                    configuration.settings.tracking, run, run_id, name, configuration.resolved()
                )
            )
            session = Session(run, run_id, ledger, launcher, display, nodes, trackers)
            failed = run_stages(stages, session)
            if ledger.rows("stages"):
                build(run, configuration.experiment, again)
            ledger.put("runs", {_SHOWN: {"all": True}})
        except KeyboardInterrupt:
            display.say(f"interrupted; what is finished is kept. Continue with: {again}")
            return 130
        except (OSError, LostLeaseError) as error:
            failed = f"the run directory cannot be written: {error}"
        except UnitError as error:
            failed = str(error)
        if failed:
            display.say(f"failed: {failed}\ncontinue with: {again}")
            return 1
        _recommend(request, configuration, ledger)
        display.say(f"done: {run.shown} (report: {run.shown}/report/index.html)")
        return 0


def submit(request: Request, address: str, *, follow: bool) -> int:
    """``raypipe submit``: a run as a job of a cluster; its status where it is followed."""
    document = config.read(request.path)
    # mistakes show before anything is sent; the hardware there may pick another profile
    config.resolve(document, request.overrides, request.profile, [hardware.detect()])
    path = Path(request.path)
    if path.is_absolute() or not path.resolve().is_relative_to(Path.cwd()):
        raise ConfigError(
            f"{request.path}: lies outside of this directory, of which the job gets a copy; "
            "name a file in it by its relative path"
        )
    run = RunDirectory(_shared(request.run_dir))
    words = request.words(run)
    if shlex.join(words) != request.again(run):
        raise ConfigError(
            f"--run-dir {run.shown}: the command of a job is shown on the dashboard: leave the "
            "credentials out, and give them to the cluster's nodes (AWS_ACCESS_KEY_ID, ...)"
        )
    from raypipe.launch.submit import submit

    passed = {name: value for name in (faults.VARIABLE,) if (value := os.environ.get(name))}

    def say(text: str) -> None:
        print(text, flush=True)

    return submit(address, words, passed, say, follow=follow)


def sweep(request: Request) -> int:
    """``raypipe sweep``: the sweep alone; prints what it recommends, and may write it."""
    if request.write is not None and Path(request.write).exists():
        raise ConfigError(f"--write {request.write}: exists already; choose another name")
    return run(replace(request, only=[SWEEP]))


def fit(request: Request, stage: str | None) -> list[Row]:
    """``raypipe fit``: a row for each training stage and precision."""
    document = config.read(request.path)
    faults.from_environment()
    cache_directory()  # a mistake in its name shows before anything starts
    rows: list[Row] = []
    with ExitStack() as stack:
        launcher = _attach(request.address, stack)
        nodes = launcher.on_every_node(hardware.detect) if launcher else [hardware.detect()]
        configuration = config.resolve(document, request.overrides, request.profile, nodes)
        makers = fitting(configuration, stage, nodes)
        folder = stack.enter_context(TemporaryDirectory(prefix="raypipe-fit-"))
        run, name = RunDirectory.at(folder), configuration.experiment.name
        display = stack.enter_context(Display())
        _announce(display, configuration, nodes)
        launcher = launcher or _start(stack)
        trackers = stack.enter_context(open_trackers((), run, "fit", name, {}))
        session = Session(run, "fit", Ledger(run), launcher, display, nodes, trackers)
        for maker in makers:
            rows += fit_stage(maker, session)
        memories = [gpu.memory_bytes for node in nodes for gpu in node.gpus]
        rows += published(configuration.experiment.presets, min(memories, default=None))
    return rows


def _recommend(request: Request, configuration: Configuration, ledger: Ledger) -> None:
    """Show what the sweep recommends; write it as a configuration where one is asked for."""
    settings = configuration.settings.sweep
    if request.command != "sweep" or settings is None:
        return
    row = ledger.get("recommendations", settings.stage)
    if row is None:
        print("nothing is recommended: no point succeeded with losses that agree", flush=True)
        return
    print(row["snippet"], flush=True)
    if request.write is not None:
        chosen = {**row["settings"], f"{settings.stage}.from_sweep": False, SWEEP: None}
        text = snippet(configuration.with_values(chosen, "the sweep").resolved(), row["reason"])
        try:
            Path(request.write).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {request.write}: cannot be written: {error}") from error


def _attach(address: str | None, stack: ExitStack) -> Launcher | None:
    """The launcher of a cluster that is already there; None on a plain machine."""
    if address is None and not in_cluster():
        return None
    from raypipe.launch.cluster import RayLauncher

    launcher = RayLauncher(address)
    stack.callback(launcher.close)
    return launcher


def _start(stack: ExitStack) -> Launcher:
    from raypipe.launch.cluster import RayLauncher

    launcher = RayLauncher()
    stack.callback(launcher.close)
    return launcher


def stages_of(
    configuration: Configuration, only: Sequence[str], nodes: Sequence[Hardware]
) -> list[Stage]:
    """What a command runs: the wanted stages and what they need, the sweep too."""
    stages = in_order(with_sweep(configuration, nodes))
    names = [stage.name for stage in stages]
    for name in only:
        if name not in names:
            if name == SWEEP:
                raise ConfigError(
                    f"{configuration.origin}: has no sweep: give it a section `sweep` with "
                    "stage and axes (docs/sweeps.md)"
                )
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"--only {name}: unknown stage{hint} (there are: {', '.join(names)})")
    return with_needs(stages, only) if only else stages


def _check_training(configuration: Configuration, nodes: Sequence[Hardware]) -> None:
    """Refuse before anything starts what the hardware lacks."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    capability = hardware.lowest_compute_capability(nodes)
    for name, section in configuration.settings:
        training = getattr(section, "training", None)
        if training is None:
            continue
        workers, each = section.scaling.fewest_workers, section.scaling.gpus_per_worker
        if each is None and 0 < len(gpus) < workers:
            raise ConfigError(
                f"{configuration.origin}: {name}.scaling.workers = {workers}: there are only "
                f"{len(gpus)} GPUs; lower it, or set {name}.scaling.gpus_per_worker to share them "
                "(0.5) or to train on the CPUs (0)"
            )
        shares = gpus and each is not None and 0 < each < 1 and section.scaling.most_workers > 1
        if shares and "fsdp" in (section.scaling.strategy, *section.on_oom):
            raise ConfigError(
                f"{configuration.origin}: {name}.scaling.gpus_per_worker = {each}: workers that "
                "share a GPU cannot shard a model (strategy or on_oom: fsdp): NCCL refuses them; "
                "use ddp, or a GPU for each worker"
            )
        on_gpu = capability if each != 0 else None
        allowed = hardware.supported_precisions(on_gpu)
        wanted = {f"{name}.training.precision": training.precision}
        if "bf16" in section.on_oom:
            wanted[f"{name}.on_oom"] = "bf16"
        for key, precision in wanted.items():
            if reason := section.unusable.get(precision):
                raise ConfigError(f"{configuration.origin}: {key} = {precision}: {reason}")
            if precision not in allowed:
                raise ConfigError(
                    f"{configuration.origin}: {key} = {precision}: this "
                    f"{'GPU' if on_gpu else 'CPU'} lacks it (allowed here: {', '.join(allowed)})"
                )


def _run_directory(run_dir: str | None, configuration: Configuration) -> RunDirectory:
    runs = os.environ.get(RUNS)
    if in_job():
        _shared(run_dir or runs)
    if run_dir is None:
        return RunDirectory.new(runs or "runs", configuration.experiment.name)
    run = RunDirectory.at(run_dir)
    run.check()
    if run.is_local and Path(run.path()).is_file():
        raise ConfigError(f"--run-dir {run.shown}: is a file, not a directory")
    return run


def _refuse_another(ledger: Ledger, configuration: Configuration, run: RunDirectory) -> None:
    """Refuse a run directory that another experiment's run lies in."""
    stored = ledger.get("runs", "run")
    if stored is not None and stored["experiment"] != configuration.experiment.name:
        raise ConfigError(
            f"--run-dir {run.shown}: holds a run of the experiment {stored['experiment']!r}; "
            "use another directory"
        )


def _shared(location: str | None) -> str:
    """A location that means the same on every node. Raises ConfigError."""
    if location is None or not ("://" in location or Path(location).is_absolute()):
        raise ConfigError(
            "in a Ray job the working directory is a throw-away copy: give --run-dir, or set "
            f"{RUNS}, as an absolute path on shared storage or as a URI"
        )
    return location


def _is_shown(run: RunDirectory, ledger: Ledger) -> bool:
    """Whether the tables and the report are there, written after the last unit was stored."""
    tables = [run.partition(table, "data") for table in single_tables(ledger)]
    files = [run.config, *tables, f"{run.report}/index.html"]
    return ledger.get("runs", _SHOWN) == {"all": True} and all(run.exists(file) for file in files)


def _run_id(ledger: Ledger, configuration: Configuration) -> str:
    """The run's name in every row, made once for a run directory."""
    stored = ledger.get("runs", "run")
    if stored is None:
        name = configuration.experiment.name
        stored = {"experiment": name, "run_id": f"{name}-{os.urandom(4).hex()}"}
        ledger.put("runs", {"run": stored})
    return str(stored["run_id"])


def _announce(display: Display, configuration: Configuration, nodes: Sequence[Hardware]) -> None:
    gpus = [gpu.name for node in nodes for gpu in node.gpus]
    if gpus:
        found = f"{len(gpus)} GPU(s): {gpus[0]}"
    else:
        note = next((node.gpu_note for node in nodes if node.gpu_note), "none found")
        found = f"no GPU ({note})"
    display.say(f"profile {configuration.profile}: {found}")
    if value := os.environ.get(faults.VARIABLE):
        display.say(f"WARNING: failures on purpose are switched on: {faults.VARIABLE}={value}")
