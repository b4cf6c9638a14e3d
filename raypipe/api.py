"""The verbs of raypipe: each is one function, which Python and the command line call.

The first part of a docstring is the text of ``--help``, its list of arguments that of the options.
Errors have the text of the command line: a mistake is a :class:`~raypipe.errors.ConfigError`, a run
that failed a :class:`RunFailedError`. Modules are imported where a verb needs them, so that every
command starts with few. Verbs that a terminal reads return text.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from raypipe.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from raypipe.commands.replay import Replay
    from raypipe.config.document import Document
    from raypipe.store.call_files import RunFile
    from raypipe.store.run_directory import RunDirectory

#: a configuration: its file, or its content
Config = str | os.PathLike[str] | Mapping[str, Any]
#: values by dotted key, or texts of the form ``dotted.key=value``
Values = Mapping[str, Any] | Sequence[str]
Location = str | os.PathLike[str]


class ClusterSizes(TypedDict, total=False):
    """The sizes of a cluster, which ``init`` and ``submit`` have as arguments.

    Args:
        nodes: Nodes of a SLURM job [default: 1], or the most CPU workers of a cluster [default: 8].
        cpus: CPUs per node. [default: 8; on Kubernetes 16]
        memory: Memory per node, such as 64G. [default: 32G]
        gpus: GPUs per node, on Kubernetes per GPU worker. [default: 0; on Kubernetes 1]
        time: Time limit of a SLURM job, such as 12h. [default: 24h]
        account: Account in SLURM.
        partition: Partition of SLURM.

    """

    nodes: int
    cpus: int
    memory: str
    gpus: int
    time: str
    account: str
    partition: str


class RunFailedError(RuntimeError):
    """A stage failed; ``run`` has what is finished, and the failures."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Best:
    """The best result of a run.

    Attributes:
        metric: the table and the column, such as ``calls.accuracy``.
        better: ``lower`` or ``higher``.
        value: the number, a mean over repetitions if there are any.
        points: the settings that have it, by key; several if they are equally good.
        runs: the number of repetitions.
        text: the result as the end of a command prints it.

    """

    metric: str
    better: str
    value: float
    points: Sequence[Mapping[str, Any]]
    runs: int
    text: str


@dataclass(frozen=True)
class Run:
    """A run directory: its tables as data frames, its failures and its report."""

    directory: RunDirectory

    @property
    def run_dir(self) -> str:
        """The path or URI of the run directory."""
        return self.directory.shown

    @property
    def tables(self) -> list[str]:
        """The names of the tables."""
        return self.directory.list(self.directory.path("results"))

    def table(self, name: str) -> pd.DataFrame:
        """Return a results table, such as ``calls``, ``trials`` or ``steps``.

        Raises:
            ConfigError: there is no such table, or it is damaged.

        """
        from raypipe.commands.results import table
        from raypipe.store.tables import ADDED

        rows: pd.DataFrame = table(self.directory, name).to_pandas()
        last = [column for column in ADDED if column in rows.columns]
        return rows[[*rows.columns.difference(last, sort=False), *last]]

    def sql(self, query: str) -> pd.DataFrame:
        """Return the result of a SQL query over all tables, in DuckDB (extra ``sql``).

        Raises:
            ConfigError: the query is wrong, or DuckDB is not installed.

        """
        from raypipe.store.tables import sql

        rows: pd.DataFrame = sql(self.directory, query).to_pandas()
        return rows

    def files(self, name: str = "*", call: str = "*") -> list[RunFile]:
        """Return the files that calls of a function wrote to ``rp.output_dir()``.

        Each has its ``path``, a URI in an object store, and ``open()``, which reads it there, too.

        Args:
            name: the name of a file, or a pattern such as ``*.png``.
            call: the name of a call, as in the table ``calls``, or a pattern: ``gamma=0.1*``.

        Raises:
            ConfigError: it is not the run of a function, or its table is damaged.

        """
        from fnmatch import fnmatchcase

        from raypipe.store.call_files import files_of

        return [
            file
            for file in files_of(self.directory, self.table("calls"))
            if fnmatchcase(file.name, name) and (file.call == call or fnmatchcase(file.call, call))
        ]

    @property
    def status(self) -> str:
        """``succeeded``, ``failed``, ``interrupted`` or ``running``: that of the newest command."""
        from raypipe.commands.summary import summary

        return summary(self.directory).status

    @property
    def failures(self) -> pd.DataFrame:
        """The failed attempts, with their tracebacks."""
        return self.table("failures")

    def best(self, metric: str = "") -> Best | None:
        """Return the best result, that of the end of the command; None if no number is finite.

        Args:
            metric: a column or ``table.column`` that says what is better; by default the first one
                that has a finite number.

        Raises:
            ConfigError: there is no such metric, or a table is damaged.

        """
        from raypipe.commands.results import results_of

        bests = results_of(self.directory).bests
        for each in bests:
            if metric in ("", each.column.name, each.metric):
                points = [plain(dict(point.values)) for point in each.ranking[: each.ties]]
                better, mean = each.column.better, each.mean
                return Best(each.metric, better, mean, points, each.runs, each.result)
        if not metric:
            return None
        known = ", ".join(dict.fromkeys(each.metric for each in bests)) or "none"
        raise ConfigError(f"best: metric = {metric}: has no finite result (those with: {known})")

    def report(self) -> Path | str:
        """Write the report again; return the path of its page."""
        return report(self.directory.location)

    def __repr__(self) -> str:
        """Return the status and the run directory."""
        return f"<Run {self.run_dir}: {self.status}, tables: {', '.join(self.tables)}>"


def open(run_dir: Location) -> Run:
    """Return a run that exists, by its path or URI. Raises ConfigError if there is none."""
    from raypipe.commands.results import existing

    return Run(existing(os.fspath(run_dir)))


# run an experiment


def run(
    config: Config,
    overrides: Values = (),
    *,
    run_dir: Location | None = None,
    profile: str = "auto",
    only: Sequence[str] = (),
    matrix: Values = (),
    address: str | None = None,
    time_budget: str | None = None,
    local: bool = False,
    shared: bool = False,
    report: bool = True,
    ui: bool = False,
    note: str = "",
    tag: Sequence[str] = (),
) -> Run:
    """Run an experiment; finished work is kept and never repeated.

    Args:
        config: The YAML file of the experiment, or the name of one that comes with raypipe
            (`raypipe run --list`).
        overrides: Override any key by its dotted path, e.g. lda.runs=2
            train_small.training.precision=bf16 'lda.datasets=[20news,agnews]'.
        run_dir: Where results go; the same directory again continues that run. A path or a URI
            (s3://...). [default: runs/<experiment>/<timestamp>-<id>]
        profile: auto (by the hardware), cpu, gpu, or a name from `profiles:`.
        only: Run these stages and what they need.
        matrix: Run every combination of these values in one run directory; the same as
            matrix.KEY=[...]. `--matrix runs=5` repeats with five seeds.
        address: A Ray cluster to use. [default: start one here]
        time_budget: End in order before this time is over, with checkpoints of running trainings:
            2h, 90m, 3600s. The same command continues.
        local: Run everything in this one process, without Ray, so that breakpoint() and pdb work;
            the results are the same.
        shared: Share the points of the run with other commands that have this option, too; each
            ends when the run has.
        report: Write the page of the results at the end. Without it, `raypipe report` writes it
            later, and the page of an earlier command is removed.
        ui: Print the link of a page that shows this run in a browser while it goes on (extra `ui`);
            `raypipe ui` shows it afterwards.
        note: A note on the run, one line, which replaces an earlier one; `raypipe tag` changes it.
        tag: A tag of the run, one word, in addition to earlier ones; may be repeated.

    Raises:
        ConfigError: a mistake; nothing was started.
        RunFailedError: a stage failed; what is finished is kept.
        KeyboardInterrupt: it was interrupted, or its time is over.

    Examples:
        raypipe run quickstart
        raypipe run --list
        raypipe run configs/pabbo_lda.yaml lda.runs=2 --run-dir runs/mine --only lda

    """
    return _run(run, locals())


def sweep(
    config: Config,
    overrides: Values = (),
    *,
    run_dir: Location | None = None,
    profile: str = "auto",
    address: str | None = None,
    time_budget: str | None = None,
    write: Location | None = None,
    report: bool = True,
    ui: bool = False,
    note: str = "",
    tag: Sequence[str] = (),
) -> Run:
    r"""Measure the points of the section `sweep` and recommend one for this machine.

    The table `recommendations` has the recommended settings.

    Args:
        config: As of run.
        overrides: As of run.
        run_dir: As of run.
        profile: As of run.
        address: As of run.
        time_budget: As of run.
        write: Write the configuration with the best point there.
        report: As of run.
        ui: As of run.
        note: As of run.
        tag: As of run.

    Examples:
        raypipe sweep configs/quickstart.yaml
        raypipe sweep configs/pabbo_lda.yaml 'sweep.axes.training.micro_batch=[4,8,16]' \
          --run-dir runs/mine --write configs/mine.yaml

    """
    given = locals()
    from raypipe.commands.run import print_recommendation

    if write is not None and Path(write).exists():
        raise ConfigError(f"--write {write}: exists already; choose another name")
    if write is not None and not os.access(Path(write).absolute().parent, os.W_OK):
        raise ConfigError(f"--write {write}: its folder does not exist or cannot be written")
    at_end = partial(print_recommendation, write)
    return _run(sweep, {**given, "only": ["sweep"], "at_end": at_end})


def map(
    function: Callable[..., Any] | str,
    arguments: Values = (),
    *,
    cpus: float = 1.0,
    gpus: float = 0.0,
    attempts: int = 3,
    time_limit: str | float | None = None,
    maximize: str | Sequence[str] = (),
    minimize: str | Sequence[str] = (),
    version: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    run_dir: Location | None = None,
    address: str | None = None,
    time_budget: str | None = None,
    local: bool = False,
    report: bool = True,
    ui: bool = False,
    note: str = "",
    tag: Sequence[str] = (),
) -> Run:
    """Call a function for every combination of its arguments; each call becomes a row.

    What a call returns, a mapping of single values, is a row of the table `calls` with the
    arguments as further columns. Calls that are stored are not repeated.

    Args:
        function: The function, e.g. mymodule:score.
        arguments: Arguments; a list [0.1,1,10] or a range 0..4 (both ends included) is an axis.
            Other keys are settings, such as matrix.search or tracking=[tensorboard].
        cpus: CPUs per call, such as 0.5.
        gpus: GPUs per call.
        attempts: Attempts of a call whose worker dies or takes too long.
        time_limit: Time after which an attempt is ended: 90s, 10m, 2h.
        maximize: A returned value; higher is better.
        minimize: A returned value; lower is better.
        version: Version of the results. [default: 1, for the present source code only]
        overrides: in Python, other settings by dotted key, such as ``matrix.search``.
        run_dir: As of run.
        address: As of run.
        time_budget: As of run.
        local: As of run.
        report: As of run.
        ui: As of run.
        note: As of run.
        tag: As of run.

    Raises:
        ConfigError: a mistake; nothing was started.
        RunFailedError: a call failed; the others are finished.
        KeyboardInterrupt: it was interrupted, or its time is over.

    Examples:
        raypipe map mymodule:score 'C=[0.1,1,10]' 'gamma=[0.01,0.1]' seed=0..4 --cpus 0.5
        raypipe map mymodule:score seed=0..99 --maximize accuracy --run-dir runs/mine

    """
    given = locals()
    from raypipe.commands.configuration import document_of

    names = ("cpus", "gpus", "attempts", "time_limit", "maximize", "minimize", "version")
    values = plain(arguments) if isinstance(arguments, Mapping) else arguments
    document, words = document_of(function, values, {name: given[name] for name in names})
    return _run(map, given, document, [*words, *_texts(overrides or {})])


def submit(
    config: str,
    overrides: Sequence[str] = (),
    *,
    run_dir: str,
    address: str | None = None,
    slurm: bool = False,
    profile: str = "auto",
    only: Sequence[str] = (),
    matrix: Sequence[str] = (),
    time_budget: str | None = None,
    note: str = "",
    tag: Sequence[str] = (),
    jobs: int | None = None,
    follow: bool = True,
    **sizes: Unpack[ClusterSizes],
) -> int:
    r"""Run an experiment as a job of a Ray cluster, with a copy of this directory, or of SLURM.

    A job of SLURM runs the script of `raypipe init --slurm`, the one in this directory if there is
    one; sizes override the script's. It is followed by `raypipe watch`, also after a requeue.

    Args:
        config: As of run.
        overrides: As of run.
        run_dir: Where results go: a URI (s3://...), or a path on storage that all nodes share.
        address: The dashboard of a Ray cluster, e.g. http://HEAD:8265.
        slurm: Submit to SLURM.
        profile: As of run.
        only: As of run.
        matrix: As of run.
        time_budget: As of run.
        note: As of run.
        tag: As of run.
        jobs: Share the points of the run among an array of this many jobs, each of these sizes.
        follow: Show the log, or how far the run is, and wait for the end.
        **sizes: As of ClusterSizes.

    Examples:
        raypipe submit configs/pabbo_lda.yaml --address http://HEAD:8265 --run-dir /shared/runs/mine
        raypipe submit configs/lm_pretrain.yaml train.training.steps=5000 --no-follow \
          --address http://HEAD:8265 --run-dir s3://BUCKET/runs/lm
        raypipe submit pabbo_lda --slurm --run-dir /shared/runs/mine --nodes 2 --time 12h
        raypipe submit pabbo_lda --slurm --run-dir /shared/runs/mine --jobs 8

    """
    given = {**locals(), "address": None}
    from raypipe import faults, hardware
    from raypipe.commands import cluster_files, seconds_of
    from raypipe.commands.cluster import check_shared
    from raypipe.commands.configuration import resolve
    from raypipe.config.shipped import file_of
    from raypipe.store import run_notes
    from raypipe.store.run_directory import RunDirectory

    if slurm == (address is not None):
        raise ConfigError("raypipe submit: give --address of a Ray cluster, or --slurm")
    wanted = dict(sizes) if jobs is None else {**sizes, "jobs": jobs}
    checked = cluster_files.sizes_of(cluster_files.kind_of(given), given, wanted)
    notes = run_notes.checked(note, tag)
    given |= {"note": notes.note, "tag": notes.tags, "shared": jobs is not None}
    document = _document(config)
    if time_budget is not None:
        seconds_of(time_budget)  # raises if it is not a time
    # mistakes show before anything is sent; the hardware there may select another profile
    here = [hardware.detect()]
    resolved = resolve(document, [*overrides, *_of_matrix(matrix)], profile, here)
    if jobs is not None:
        from raypipe.commands.plan import work_of

        work_of(resolved, only, here).check_shared(run_dir)
    if slurm:  # whose nodes share this directory
        directory = RunDirectory.at(run_dir)
        run_dir = directory.location
    else:
        path, file = Path(config), file_of(config)
        shipped = file != path and file.is_absolute()  # the nodes have it, too
        if not shipped and (path.is_absolute() or not path.resolve().is_relative_to(Path.cwd())):
            raise ConfigError(
                f"{config}: lies outside of this directory, of which the job gets a copy; "
                "name a file in it by its relative path"
            )
        check_shared(run_dir)
    given["run_dir"] = run_dir
    words = command_line(run, given)
    if shlex.join(words) != (shown := shown_command(run, given)):
        raise ConfigError(
            f"{shown}: a dashboard, or SLURM, shows the command of a job: leave the credentials "
            "out, and give them to the cluster's nodes (AWS_ACCESS_KEY_ID, ...), or "
            "notify in CONFIG"
        )
    if address is None:
        from raypipe.commands import slurm_jobs

        directory.check_new()
        job = slurm_jobs.submit(directory, words[2:], checked)
        return slurm_jobs.follow(directory, job) if follow else 0
    try:
        from raypipe.launch.submit import submit as submit_job
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"raypipe submit: needs {error.name}; pip install 'raypipe-runner[cluster]'"
        ) from error

    passed = {name: value for name in (faults.VARIABLE,) if (value := os.environ.get(name))}
    return submit_job(address, words, passed, partial(print, flush=True), follow=follow)


def plan(
    config: Config,
    overrides: Values = (),
    *,
    run_dir: Location | None = None,
    profile: str = "auto",
    only: Sequence[str] = (),
    matrix: Values = (),
) -> pd.DataFrame:
    """Show what would run, what is done and the expected cost; start nothing.

    Args:
        config: As of run.
        overrides: As of run.
        run_dir: As of run.
        profile: As of run.
        only: As of run.
        matrix: As of run.

    """
    import pandas as pd

    from raypipe.commands.plan import plan as planned

    texts = [*_texts(overrides), *_of_matrix(matrix)]
    return pd.DataFrame(planned(_document(config), texts, run_dir, profile, only))


def fit(
    config: Config,
    overrides: Values = (),
    *,
    profile: str = "auto",
    address: str | None = None,
    stage: str | None = None,
    card: str | None = None,
) -> pd.DataFrame:
    """Find the largest micro-batch of each precision that fits, by a few real steps each.

    The accumulation keeps training.effective_batch; 5 % of the memory stay free.

    With a card nothing is trained: memory, speed and energy are predicted from the model.

    Args:
        config: As of run.
        overrides: As of run.
        profile: As of run.
        address: As of run.
        stage: A training stage. [default: all]
        card: Predict for this card instead, e.g. "RTX A6000", h100-80; needs no GPU. `all` compares
            all cards.

    Examples:
        raypipe fit configs/pabbo_lda.yaml
        raypipe fit lm_pretrain --card "RTX A6000"
        raypipe fit summarization model=mt5_1_2b train.scaling.workers=4 --card a100-40
        raypipe fit lm_pretrain --card all

    """
    import pandas as pd

    document, texts = _document(config), _texts(overrides)
    if card is None:
        from raypipe.commands.run import fit as fitted

        rows = fitted(document, texts, profile, address, stage)
    else:
        from raypipe.commands.prediction import predict

        rows = predict(document, texts, card, profile=profile, stage=stage)
    return pd.DataFrame(rows).convert_dtypes()


def config(
    config: str, overrides: Sequence[str] = (), *, profile: str = "auto", keys: bool = False
) -> str:
    """Show the resolved configuration with the origin of every value, or all keys.

    Args:
        config: As of run.
        overrides: As of run.
        profile: As of run.
        keys: List the keys with type, default and meaning instead.

    """
    from raypipe.commands.configuration import configuration_text

    return configuration_text(config, overrides, profile, keys=keys)


def doctor(*, as_json: bool = False) -> tuple[str, int]:
    """Show the hardware and the environment: GPUs, CPUs, memory, versions, Ray cluster.

    The exit status is 2 if there are GPUs and none of them can be used.

    Args:
        as_json: Print JSON.

    """
    from raypipe import hardware
    from raypipe.commands import cluster
    from raypipe.provenance import environment_row, git_commit

    here = hardware.detect()
    with ExitStack() as stack:
        launcher = cluster.attach(None, stack)
        nodes = launcher.on_every_node(hardware.detect) if launcher is not None else []
    status = 2 * any(node.gpu_problems and not node.gpus for node in (here, *nodes))
    machine = {**environment_row(), "git_commit": git_commit()}
    if as_json:
        machine |= {"hardware": asdict(here), "cluster": [asdict(n) for n in nodes] or None}
        return json.dumps(machine, indent=2), status
    lines = [
        f"GPU {gpu.index}: {gpu.name}, {hardware.bytes_text(gpu.memory_bytes)}, "
        f"compute capability {gpu.compute_capability}, {gpu.uuid}"
        for gpu in here.gpus
    ]
    lines = lines or [f"no GPU ({here.gpu_note}): the cpu profile will be used"]
    lines += [f"not used: {problem}" for problem in here.gpu_problems]
    lines += [f"{name}: {value}" for name, value in machine.items() if name != "gpus"]
    lines.append(f"Ray cluster: {f'{len(nodes)} node(s)' if nodes else 'none'}")
    lines += [f"{node.hostname}: not used: {p}" for node in nodes for p in node.gpu_problems]
    return "\n".join(lines), status


def init(
    name: str | None = None,
    *,
    template: str = "function",
    slurm: bool = False,
    kubernetes: bool = False,
    aws: bool = False,
    **sizes: Unpack[ClusterSizes],
) -> str:
    """Write a small project of your own that runs at once: code, YAML, test, README.

    With --slurm, --kubernetes or --aws write instead what runs an existing project on a cluster.

    Args:
        name: The new folder; of files for a cluster, that of the project. [default: my_TEMPLATE; of
            files for a cluster, this folder]
        template: function (a Python function), or training (a classifier, and a sweep of it).
        slurm: Write the script of a SLURM job.
        kubernetes: Write an image and a RayJob for Kubernetes.
        aws: Write a cluster on AWS for Ray's launcher.
        **sizes: As of ClusterSizes.

    Examples:
        raypipe init mine
        raypipe init mine --template training
        raypipe init --slurm --partition gpu --gpus 1 --time 12h

    """
    given = locals()
    from raypipe.commands import cluster_files
    from raypipe.config.validation import near_and_all

    kind = cluster_files.kind_of(given)
    checked = cluster_files.sizes_of(kind, given, sizes)
    if kind and template != "function":
        raise ConfigError(f"--template {template}: is a project without --{kind}; give one of them")
    if kind:
        return cluster_files.write(kind, Path(name or ""), checked)
    templates = Path(__file__).with_name("commands") / "templates"
    known = ("function", "training")
    if template not in known:
        listed = near_and_all(template, known)
        raise ConfigError(f"--template {template}: no such template{listed}")
    folder = Path(name if name is not None else f"my_{template}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not an empty folder; give the name of a new one")
    files = [file for file in sorted((templates / template).iterdir()) if file.is_file()]
    texts = {folder / file.name: file.read_text(encoding="utf-8") for file in files}
    readme = texts[folder / "README.md"].replace("{name}", folder.resolve().name)
    texts[folder / "README.md"] = readme
    commands = readme.partition("```bash\n")[2].partition("\n```")[0]
    return cluster_files.written(folder, texts, [f"cd {shlex.quote(str(folder))}", commands])


# read a run


def results(
    run_dir: str,
    table: str | None = None,
    *,
    columns: str | None = None,
    sort: str | None = None,
    sql: str | None = None,
    as_csv: bool = False,
    as_json: bool = False,
) -> str:
    """Print a results table as wide as the terminal; without TABLE, list the tables.

    Args:
        run_dir: The directory of a run.
        table: e.g. studies, trials, failures.
        columns: Show these columns, in this order.
        sort: Sort by these columns; `-` before a name: largest first.
        sql: Query all tables of the run by SQL (DuckDB) instead.
        as_csv: Print CSV: all rows and columns.
        as_json: Print a JSON list of objects: all rows and columns.

    Examples:
        raypipe results RUN_DIR trials --columns trial_id,samples_per_s --sort -samples_per_s
        raypipe results RUN_DIR steps --csv > steps.csv
        raypipe results RUN_DIR --sql 'select optimizer, avg(best_T) from studies group by 1'

    """
    from raypipe.commands.results import results as printed

    if as_csv and as_json:
        raise ConfigError("--csv and --json: give one of them")
    if sql is not None and table is not None:
        raise ConfigError("--sql: the query names its tables; leave TABLE out")
    form = "csv" if as_csv else "json" if as_json else ""
    return printed(run_dir, table, columns, sort, sql, form)


def report(run_dir: str) -> str:
    """Write report/index.html (one self-contained page) and the figures again.

    Args:
        run_dir: The directory of a run.

    """
    from raypipe.commands import configuration
    from raypipe.commands.results import existing
    from raypipe.report.page import build
    from raypipe.store import tables
    from raypipe.store.ledger import Ledger
    from raypipe.store.lock import is_held

    run = existing(run_dir)
    document = configuration.stored_document(run)
    if document.experiment:  # a function is not imported
        configuration.refuse_code_inside(run, document.experiment)
    experiment = configuration.stored_experiment(document)
    try:
        # a killed command leaves tables behind its ledger; one that runs writes them itself
        if not is_held(run):
            ledger = Ledger.to_read(run)
            if (row := ledger.get("runs", "run")) is not None and not ledger.damage:
                declared = configuration.declared(experiment)
                tables.write_tables(run, ledger, declared, str(row["run_id"]))
        own, command = configuration.of_report(experiment), command_of(run)
        return build(run, experiment.name, experiment.report, command, own)
    except OSError as error:
        raise ConfigError(f"{run.shown}/report: cannot be written: {error}") from error


def logs(run_dir: str, unit: str | None = None) -> str:
    """Print what a unit printed and why it failed; without UNIT, list all logs and failures.

    Args:
        run_dir: The directory of a run.
        unit: A unit, task or trial, as the list shows it.

    """
    from raypipe.commands.summary import log_text, logs_text

    return logs_text(run_dir) if unit is None else log_text(run_dir, unit)


def ls(directory: str | None = None, *, tag: Sequence[str] = ()) -> str:
    """List runs, the newest first: status, age, time, stages, key result, tags and note.

    Args:
        directory: A folder or URI with run directories in it, at any depth. [default: RAYPIPE_RUNS,
            else runs]
        tag: Only runs with this tag; may be repeated.

    """
    from raypipe.commands import runs_location
    from raypipe.commands.listing import listing_text, runs
    from raypipe.commands.table_view import terminal_width

    location = directory or runs_location()
    found = [each for each in runs(location) if {*tag} <= {*each.notes.tags}]
    return listing_text(found, location, terminal_width(), tag)


def tag(
    run_dir: str,
    tags: Sequence[str] = (),
    *,
    remove: Sequence[str] = (),
    note: str | None = None,
) -> str:
    """Add tags to a run, remove tags or replace its note, also while it goes on; print both.

    Args:
        run_dir: The directory of a run.
        tags: Tags to add, each one word.
        remove: Remove this tag; may be repeated.
        note: The new note; an empty text removes it.

    Examples:
        raypipe tag RUN_DIR baseline paper --note "with the old tokenizer"
        raypipe tag RUN_DIR --remove paper

    """
    from raypipe.commands.results import opened
    from raypipe.store.run_notes import change

    notes = change(opened(run_dir), note, tags, remove)
    return f"tags: {' '.join(notes.tags) or 'none'}\nnote: {notes.note or 'none'}"


def show(run_dir: str, *, code: bool = False) -> str:
    """Show what happened in a run: code, hardware, time, stages, results and failures.

    Args:
        run_dir: The directory of a run.
        code: Print the kept source code, with the units that ran with it.

    """
    from raypipe.commands.results import opened
    from raypipe.commands.summary import show_text
    from raypipe.graph.source import code_text

    run = opened(run_dir)
    return code_text(run) if code else show_text(run)


def replay(run_dir: Location, units: Sequence[str] = ()) -> Replay:
    """Compute stored units again and compare: equal, within a tolerance, or what differs and why.

    They run in this process, without caches; RUN_DIR is only read. Columns that measure time,
    memory or speed are not compared. The exit status is 0 if all results are equal or within the
    tolerance, 1 otherwise.

    Args:
        run_dir: The directory of a run.
        units: Names of units, or what such names begin with, e.g. a stage. [default: three that
            are evenly spaced]

    Raises:
        ConfigError: a mistake, or nothing that can be computed again.

    Examples:
        raypipe replay RUN_DIR
        raypipe replay RUN_DIR lda/20news/ga/0

    """
    from raypipe.commands.replay import replay as replayed

    return replayed(os.fspath(run_dir), [units] if isinstance(units, str) else units)


def compare(run_dirs: Sequence[str], *, as_json: bool = False) -> str:
    """Show what differs between runs: configuration, environment and results.

    Args:
        run_dirs: Two run directories or more; the others are compared with the first.
        as_json: Print JSON.

    """
    from raypipe.commands.compare import compare as compared
    from raypipe.commands.compare import text
    from raypipe.commands.results import opened
    from raypipe.commands.table_view import terminal_width

    if len(run_dirs) < 2:
        raise ConfigError("compare: give two run directories or more")
    found = compared([opened(each) for each in run_dirs])
    return json.dumps(found, indent=1) if as_json else text(found, terminal_width())


def watch(run_dir: str) -> int:
    """Follow a run that goes on elsewhere, until it ends; Ctrl-C ends only the watching.

    The exit status is the run's: 0, 1 if it failed, 130 if it was interrupted.

    Args:
        run_dir: The directory of a run.

    """
    from raypipe.commands import slurm_jobs, summary
    from raypipe.commands.results import opened
    from raypipe.store.run_directory import RunDirectory

    directory = RunDirectory.at(run_dir)
    if job := slurm_jobs.job_of(directory):
        return slurm_jobs.follow(directory, job)
    return summary.watch(opened(run_dir))


def cancel(run_dir: str) -> str:
    """End a run that goes on: its job of SLURM, or its process of this machine.

    Finished units and the last checkpoint are kept, and the same command continues the run.

    Args:
        run_dir: The directory of a run.

    """
    from raypipe.commands import slurm_jobs
    from raypipe.store.run_directory import RunDirectory

    return slurm_jobs.cancel(RunDirectory.at(run_dir))


def ui(directories: Sequence[str] = (), *, port: int = 8270, host: str = "127.0.0.1") -> int:
    """Show runs in a browser, live: a table of all, a page for each, and comparisons.

    Run directories are only read; a run may go on elsewhere. Ctrl-C ends it.

    Args:
        directories: Folders or URIs with run directories in them, at any depth. [default:
            RAYPIPE_RUNS, else runs]
        port: The port to listen on; 0 takes a free one.
        host: The address to listen on. Any other than this machine's own (127.0.0.1) is open to the
            network: the printed link then has a token, without which nothing is shown.

    """
    from raypipe.commands import runs_location
    from raypipe.ui.address import check_installed

    check_installed("ui")
    from raypipe.ui.server import serve

    serve(list(directories) or [runs_location()], host, port)
    return 0


def command_of(run_dir: RunDirectory) -> str:
    """Return the newest command of a run directory, as its status has it.

    Of a damaged status it is the one that continues the run's configuration.
    """
    from raypipe.store import run_status

    if (status := run_status.read(run_dir)) is not None and status.command:
        return status.command
    path = run_dir.config if run_dir.is_local else "CONFIG"  # raypipe run reads it from a disk
    return shlex.join(["raypipe", "run", path, "--run-dir", run_dir.shown])


def command_line(verb: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return a call of a verb as words of the command line; defaults are left out."""
    words = ["raypipe", verb.__name__]
    for name, parameter in inspect.signature(verb).parameters.items():
        value, option = given.get(name), f"--{name.replace('_', '-')}"
        if value is None or value == parameter.default:
            continue
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
            continue
        if isinstance(value, Mapping):
            value = _texts(value)
        several = value if isinstance(value, list | tuple) else [value]
        texts = [f"{each:g}" if isinstance(each, float) else str(each) for each in several]
        is_word = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        words += texts if is_word else [word for text in texts for word in (option, text)]
    return words


def _run(
    verb: Callable[..., Run],
    given: dict[str, Any],
    document: Document | None = None,
    overrides: Sequence[str] | None = None,
) -> Run:
    """Run an experiment with the arguments of a verb.

    Raises:
        ConfigError: a mistake; nothing was started.
        RunFailedError: a stage failed.
        KeyboardInterrupt: it was interrupted.

    """
    from raypipe.commands.run import execute

    if overrides is None:
        overrides = [*_texts(given["overrides"]), *_of_matrix(given.get("matrix", ()))]
    if document is None:
        document = _document(given["config"])
    again = partial(_continuation, verb, given, document, overrides)
    named = inspect.signature(execute).parameters.values()
    wanted = [each.name for each in named if each.kind is each.KEYWORD_ONLY]
    options = {name: given[name] for name in wanted if name in given}
    if given["note"] or given["tag"]:
        from raypipe.store import run_notes

        notes = run_notes.checked(given["note"], given["tag"])
        options["at_start"] = partial(run_notes.change, note=notes.note or None, tags=notes.tags)
    if given["ui"]:
        from raypipe.ui import address, companion

        address.check_installed("--ui")
        options["page"] = companion.served
    run_dir, outcome, reason = execute(document, overrides, again, **options)
    if outcome == "interrupted":
        raise KeyboardInterrupt(reason)
    if outcome == "failed":
        raise RunFailedError(f"{reason} (run directory: {run_dir.shown})", Run(run_dir))
    return Run(run_dir)


def _continuation(
    verb: Callable[..., Run],
    given: Mapping[str, Any],
    document: Document,
    overrides: Sequence[str],
    run_dir: RunDirectory,
) -> str:
    """Return the command that continues in a run directory, without secrets.

    Of a function that only this process has, it is the call.
    """
    if document.loaded is not None:
        name = document.function.rpartition(":")[2]
        return f"rp.map({name}, ..., run_dir={run_dir.shown!r})"
    words = "arguments" if verb is map else "overrides"
    now = {**given, "run_dir": run_dir.location, "matrix": (), "write": None, "overrides": None}
    now |= {"note": "", "tag": (), "ui": False}
    if isinstance(given.get("arguments", given.get("config")), Mapping):
        verb, words, now = run, "overrides", {**now, "config": run_dir.config}
    return shown_command(verb, {**now, words: overrides})


def shown_command(verb: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Return a call of a verb as a command line without secrets."""
    from raypipe.config.validation import hidden_override
    from raypipe.redaction import without_credentials

    hidden = {
        name: [hidden_override(text) for text in _texts(given.get(name) or ())]
        for name in ("overrides", "arguments", "matrix")
    }
    return without_credentials(shlex.join(command_line(verb, {**given, **hidden})))


def _document(config: Config) -> Document:
    """Read a configuration: a file, or values. Raises ConfigError."""
    from raypipe.commands.configuration import read
    from raypipe.config.document import parse

    if isinstance(config, Mapping):
        return parse(json.dumps(plain(config)), "config")
    return read(os.fspath(config))


def _texts(values: Values) -> list[str]:
    """Return values as the texts of a command line: ``dotted.key=value``."""
    if isinstance(values, Mapping):
        return [f"{key}={json.dumps(plain(value))}" for key, value in values.items()]
    return list(values or ())


def _of_matrix(values: Values) -> list[str]:
    return [f"matrix.{text}" for text in _texts(values)]


def plain(value: Any) -> Any:
    """Return ranges and arrays as lists, NumPy's scalars as Python's, and paths as text.

    Raises:
        ConfigError: a value that no file could hold.

    """
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{value!r:.100}: a value of type {type(value).__name__} cannot be a setting or an "
        "argument, since it has no stable text; give plain values, and build or load the object in "
        "the function"
    )
