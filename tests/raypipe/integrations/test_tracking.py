"""Trackers, read back with the packages' own readers."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypipe import tracking
from raypipe.errors import ConfigError
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.tracking import TrackerName, Trackers, check, finite_numbers, flat
from tests import command

PROJECT = Path(__file__).resolve().parents[2]
ALL: tuple[TrackerName, ...] = ("tensorboard", "mlflow", "wandb")
HERE = [name for name in ALL if all(map(tracking.file_of_module, tracking._PACKAGES[name]))]
TRIAL, OTHER = "sweep/train_small/0123456789ab", "train_large"
CONFIGURATION = {
    "train_small": {"training": {"micro_batch": 1, "steps": 12}},
    "data": {"hub_token": "hf_abcdef", "source": "s3://me:pa55@bucket/x"},
}
OUTCOME = {
    "trial_id": TRIAL,
    "stage": "sweep",
    "status": "succeeded",
    "point": {"train_small.training.micro_batch": 8, "train_small.training.precision": "bf16"},
    "micro_batch": 8,
    "precision": "bf16",
    "compile": False,
    "steps": 12,
    "samples_per_s": 123.0,
    "energy_j": None,
}

#: the configuration as trackers show it, and the settings of the trial
FLAT = {
    "train_small.training.micro_batch": 1,
    "train_small.training.steps": 12,
    "data.hub_token": "***",
    "data.source": "s3://***@bucket/x",
}
SETTINGS = OUTCOME["point"] | {
    name: OUTCOME[name] for name in ("stage", "micro_batch", "precision", "compile")
}


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    # set here, what `Trackers` sets is taken back after each test
    for name, value in (tracking._ENVIRONMENT | quiet(tmp_path)).items():
        monkeypatch.setenv(name, value)


def quiet(folder: Path) -> dict[str, str]:
    """Where W&B keeps what is not of the run."""
    return {f"WANDB_{kind}_DIR": str(folder / kind) for kind in ("CACHE", "CONFIG", "DATA")}


def row(step: int, trial_id: str = TRIAL, speed: float = 10.0) -> dict[str, Any]:
    return {
        "trial_id": trial_id,
        "step": step,
        "phase": "main",
        "lr": 0.1,
        "loss": 1 / step,
        "samples_per_s": speed,
        "grad_norm": math.nan if step == 2 else 1.0,
        "eval_p@1": 0.5 if step % 2 == 0 else None,
    }


def losses(steps: range) -> dict[int, float]:
    return {step: 1 / step for step in steps}


# reading what was written


Curve = list[tuple[int, float]]


def tensorboard_curve(run: RunDirectory, trial_id: str, metric: str) -> Curve:
    return [(event.step, event.value) for event in tensorboard(run, trial_id).Scalars(metric)]


def tensorboard(run: RunDirectory, trial_id: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run.path("tracking", "tensorboard", trial_id.replace("/", "-"))
    return EventAccumulator(folder).Reload()


def mlflow_runs(run: RunDirectory, experiment: str = "quick") -> tuple[Any, dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.path('tracking', 'mlflow.db')}")
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    runs = {entry.data.tags["raypipe.trial_id"]: entry for entry in found}
    assert len(runs) == len(found), "a trial has two runs"
    return client, runs


def mlflow_curve(run: RunDirectory, trial_id: str, metric: str) -> Curve:
    client, runs = mlflow_runs(run)
    history = client.get_metric_history(runs[trial_id].info.run_id, metric)
    return [(entry.step, entry.value) for entry in history]


def wandb_curve(run: RunDirectory, trial_id: str, metric: str) -> Curve:
    history = wandb_runs(run)[trial_id].history
    return [(entry["_step"], entry[metric]) for entry in history if metric in entry]


def wandb_runs(run: RunDirectory) -> dict[str, Any]:
    files = list(Path(run.path("tracking", "wandb")).glob("*/run-*.wandb"))
    runs = {found.name: found for found in map(wandb_run, files)}
    assert len(runs) == len(files), "a trial has two files"
    return runs


def wandb_run(file: Path) -> SimpleNamespace:
    """The records of a file that ``wandb sync`` would send."""
    found = SimpleNamespace(config={}, summary={}, history=[], exit_code=None)
    for record in wandb_records(file.read_bytes()):
        if record.HasField("run"):
            found.id, found.name = record.run.run_id, record.run.display_name
            found.group, found.project = record.run.run_group, record.run.project
            found.config |= values(record.run.config.update)
        elif record.HasField("config"):
            found.config |= values(record.config.update)
        elif record.HasField("summary"):
            found.summary |= values(record.summary.update)
        elif record.HasField("history"):
            found.history.append(values(record.history.item))
        elif record.HasField("exit"):
            found.exit_code = record.exit.exit_code
    return found


def values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_records(content: bytes) -> Iterator[Any]:
    """The records of LevelDB's log format, which has them in pieces within blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    assert content.startswith(b":W&B")
    position, whole = 7, b""
    while position + 7 <= len(content):
        rest_of_block = 32768 - position % 32768
        if rest_of_block < 7:
            position += rest_of_block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


# a run whose driver is killed, and is continued in another process

PROCESS = """
import os, signal, socket, sys
from pathlib import Path
from types import SimpleNamespace

def connect(sock, address, reach=socket.socket.connect):
    assert sock.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost"), address
    return reach(sock, address)

socket.socket.connect = connect
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from test_tracking import CONFIGURATION, OTHER, OUTCOME, TRIAL, row
from raypipe.store import tables as results
from raypipe.store.run_directory import RunDirectory
from raypipe.tracking import Trackers
from raypipe.training.tables import STEPS

if sys.argv[4] == "tensorboard":
    import torch.utils.tensorboard  # once for both

run = RunDirectory.at(sys.argv[3])
if child := os.fork():
    _, ended = os.waitpid(child, 0)
    assert os.WTERMSIG(ended) == signal.SIGKILL
with Trackers([sys.argv[4]], run, "quick-1", "quick", CONFIGURATION) as trackers:
    if not child:
        for step in range(1, 7):
            trackers.log(TRIAL, row(step))
            trackers.log(OTHER, row(step, OTHER))
        trackers.end(OTHER, {"stage": OTHER, "status": "out_of_memory", "micro_batch": 8})
        results.write_table(run, STEPS, [row(step) for step in (1, 2, 3)], "quick-1", TRIAL)
        os.kill(os.getpid(), signal.SIGKILL)
    for start in (4, 8):  # from the checkpoint at step 3; once more from one at step 7
        for step in range(start, 11):
            trackers.log(TRIAL, row(step, speed=20.0))
    trackers.log(TRIAL, row(11)), trackers.log(TRIAL, row(12))
    trackers.end(TRIAL, OUTCOME)
    results.write_table(run, STEPS, [row(s, OTHER) for s in range(1, 7)], "quick-1", OTHER)
    for step in (7, 8):
        trackers.log(OTHER, row(step, OTHER))
    trackers.end(OTHER, {"stage": OTHER, "status": "succeeded", "micro_batch": 4, "steps": 8})
    trackers.log("interrupted", row(1))
"""


def needs(name: TrackerName) -> pytest.MarkDecorator:
    missing = name not in HERE
    return pytest.mark.skipif(
        missing, reason=f"needs {name}: pip install 'raypipe-runner[tracking]'"
    )


MARKS = {name: [needs(name), *[pytest.mark.slow] * (name != "tensorboard")] for name in ALL}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=marks) for name, marks in MARKS.items()]
)
def tracker(request: pytest.FixtureRequest) -> str:
    """The name of a tracker; the packages of mlflow and W&B take seconds to load."""
    return str(request.param)


@pytest.fixture(scope="module")
def continued(tracker: str, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("continued")
    words = [sys.executable, "-c", PROCESS, PROJECT, Path(__file__).parent]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "WANDB_"))}
    done = subprocess.run(
        [*words, folder / "run", tracker],
        capture_output=True,
        text=True,
        env=kept | quiet(folder),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == "", "a package says something, or a tracker failed"
    return RunDirectory.at(folder / "run")


CURVES = {"tensorboard": tensorboard_curve, "mlflow": mlflow_curve, "wandb": wandb_curve}


def test_a_tracker_shows_each_step_once(continued, tracker):
    def curve(trial_id: str, metric: str) -> dict[int, float]:
        found = CURVES[tracker](continued, trial_id, metric)
        assert len(found) == len(dict(found)), "a step came twice"
        return {step: pytest.approx(value) for step, value in found}

    assert curve(TRIAL, "loss") == losses(range(1, 13))
    assert curve(OTHER, "loss") == losses(range(1, 9))
    assert 2 not in curve(TRIAL, "grad_norm")  # it was no number
    held_out = "eval_p_1" if tracker == "mlflow" else "eval_p@1"
    assert curve(TRIAL, held_out) == dict.fromkeys(range(2, 13, 2), 0.5)


def check_tensorboard(continued: RunDirectory) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def session(trial_id: str) -> dict[str, Any]:
        content = tensorboard(continued, trial_id).summary_metadata["_hparams_/session_start_info"]
        start = HParamsPluginData.FromString(content.plugin_data.content)
        chosen = start.session_start_info.hparams
        return {name: getattr(v, v.WhichOneof("kind")) for name, v in chosen.items()}

    assert session(TRIAL) == SETTINGS | {"status": "succeeded"}
    assert session("interrupted") == {"status": "interrupted"}
    assert tensorboard_curve(continued, TRIAL, "final/samples_per_s") == [(12, 123.0)]
    (text,) = tensorboard(continued, TRIAL).Tensors("configuration/text_summary")
    assert b"train_small.training.steps: 12" in text.tensor_proto.string_val[0]


def check_mlflow(continued: RunDirectory) -> None:
    assert mlflow_curve(continued, TRIAL, "final/samples_per_s") == [(12, 123.0)]
    _, runs = mlflow_runs(continued)
    states = {trial_id: entry.info.status for trial_id, entry in runs.items()}
    assert states == {TRIAL: "FINISHED", OTHER: "FINISHED", "interrupted": "KILLED"}
    assert runs[TRIAL].info.run_name == TRIAL
    shown = {name: str(value) for name, value in (FLAT | SETTINGS).items()}
    assert runs[TRIAL].data.params == shown  # of the point, not of the configuration
    other = runs[OTHER].data
    assert other.params["micro_batch"] == "4"  # of the last attempt
    assert other.tags["raypipe.status"] == "succeeded"


def check_wandb(continued: RunDirectory) -> None:
    runs = wandb_runs(continued)
    assert set(runs) == {TRIAL, OTHER, "interrupted"}
    assert {(found.project, found.group) for found in runs.values()} == {("quick", "quick-1")}
    assert len({found.id for found in runs.values()}) == 3
    found = runs[TRIAL]
    assert found.config.items() >= (FLAT | SETTINGS).items()
    assert (found.summary["status"], found.summary["final/samples_per_s"]) == ("succeeded", 123.0)
    codes = {trial_id: entry.exit_code for trial_id, entry in runs.items()}
    assert codes == {TRIAL: 0, OTHER: 0, "interrupted": 1}


def test_a_tracker_has_settings_and_outcome(continued, tracker):
    {"tensorboard": check_tensorboard, "mlflow": check_mlflow, "wandb": check_wandb}[tracker](
        continued
    )


def test_everything_lies_under_tracking_and_no_secret_is_in_any_file(continued):
    beside = {path.name for path in Path(continued.path()).parent.iterdir()}
    assert beside <= {"run", "CACHE", "CONFIG", "DATA"}
    assert {path.name for path in Path(continued.path()).iterdir()} == {"tracking", "results"}
    files = [file for file in Path(continued.path("tracking")).rglob("*") if file.is_file()]
    assert files
    for file in files:
        content = file.read_bytes()
        assert b"hf_abcdef" not in content, file
        assert b"pa55" not in content, file


# a tracker that fails


class Kept:
    """Keeps what it is told; with an error, it fails at the second step."""

    last, error = -1, None
    made: list[Kept]

    def __init__(self, target: Any, trial_id: str) -> None:
        self.steps: list[int] = []
        self.ended: list[str] = []
        self.made.append(self)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2 and self.error is not None:
            raise self.error
        self.steps.append(step)

    def end(self, status: str, *outcome: Any) -> None:
        self.ended.append(status)


class Broken(Kept):
    error = OSError(28, "No space left on device: http://me:pa55@server")


class Interrupted(Kept):
    error = KeyboardInterrupt()


@pytest.fixture
def made(monkeypatch) -> list[Kept]:
    """What was opened, where one tracker works, one fails, and one is interrupted."""
    kinds = {"mlflow": Broken, "tensorboard": Kept, "wandb": Interrupted}
    monkeypatch.setattr(tracking, "_KINDS", kinds)
    monkeypatch.setattr(tracking, "file_of_module", lambda package: True)
    monkeypatch.setattr(Kept, "made", [], raising=False)
    return Kept.made


def test_a_failing_tracker_is_given_up_and_the_others_go_on(run, made, caplog):
    with Trackers(["mlflow", "tensorboard"], run, "quick-1", "quick", {}) as trackers:
        for step in (1, 2, 3):
            trackers.log("a", row(step))
        trackers.end("a", {"status": "succeeded"})
        trackers.log("b", row(1))
    assert [(each.steps, each.ended) for each in made] == [
        ([1], []),
        ([1, 2, 3], ["succeeded"]),
        ([1], ["interrupted"]),
    ]
    (warning,) = caplog.messages
    assert "mlflow failed" in warning
    assert "No space left" in warning
    assert "pa55" not in warning


def test_an_interrupt_is_not_taken_for_a_failure(run, made):
    with (
        pytest.raises(KeyboardInterrupt),
        Trackers(["wandb"], run, "quick-1", "quick", {}) as trackers,
    ):
        trackers.log("a", row(2))
    assert [each.ended for each in made] == [["interrupted"]]


@pytest.mark.slow
@needs("mlflow")
def test_a_server_that_is_down_is_a_warning(remote, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with Trackers(["mlflow"], remote, "quick-1", "quick", {}) as trackers:
        for step in (1, 2):
            trackers.log("a", row(step))
    assert [record.getMessage().count("mlflow failed") for record in caplog.records] == [1]
    assert not remote.exists(remote.path("tracking"))


@pytest.mark.slow
@needs("mlflow")
def test_the_server_of_the_environment_is_used(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/server.db")
    monkeypatch.chdir(tmp_path)
    with Trackers(["mlflow"], run, "quick-1", "quick", {}) as trackers:
        trackers.log("a", row(1))
    assert Path(tmp_path, "server.db").exists()
    assert not run.exists(run.path("tracking"))


# what is refused before anything starts


@pytest.mark.parametrize("name", ALL)
def test_a_missing_package_is_named(run, name, monkeypatch):
    monkeypatch.setattr("raypipe.config.shipped.find_spec", lambda package: None)
    with pytest.raises(
        ConfigError, match=rf"{name} needs {name}.*pip install 'raypipe-runner\[tracking\]'"
    ):
        check([name], run)
    with pytest.raises(ConfigError), Trackers([name], run, "quick-1", "quick", {}):
        pass
    assert not Path(run.location).exists()


def test_a_folder_is_no_package(run, tmp_path, monkeypatch):
    (tmp_path / "left_by_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tracking._PACKAGES, "wandb", ("left_by_runs",))
    with pytest.raises(ConfigError, match="wandb needs left_by_runs"):
        check(["wandb"], run)


@pytest.mark.parametrize(
    ("name", "variable", "value", "hint"),
    [
        ("tensorboard", None, None, "local run directory"),
        ("mlflow", "MLFLOW_TRACKING_URI", "http://127.0.0.1:9", "set MLFLOW_TRACKING_URI"),
        ("wandb", "WANDB_MODE", "online", "set WANDB_MODE=online"),
    ],
)
def test_a_remote_run_directory_needs_a_server(remote, name, variable, value, hint, monkeypatch):
    monkeypatch.setattr(tracking, "file_of_module", lambda package: True)
    with pytest.raises(ConfigError, match=hint):
        check([name], remote)
    if variable is not None:
        monkeypatch.setenv(variable, value)
        check([name], remote)


def test_checking_loads_no_tracker():
    code = (
        "import sys\n"
        "from raypipe.store.run_directory import RunDirectory\n"
        "from raypipe.tracking import check\n"
        f"check({HERE}, RunDirectory.at('x'))\n"
        "print([name for name in ('torch', 'tensorboard', 'mlflow', 'wandb', 'sqlalchemy') "
        "if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": {"b": {"c": 1}}, "d": None}, {"a.b.c": 1}),
        ({"a": [1, 2], "b": [], "c": {}}, {"a": "[1, 2]", "b": "[]"}),
        ({"phases": [{"steps": 3}, {"steps": 4}]}, {"phases.0.steps": 3, "phases.1.steps": 4}),
        ({"hub.token": "x", "max_tokens": 5}, {"hub.token": "***", "max_tokens": 5}),
    ],
)
def test_settings_are_flat_and_free_of_secrets(given, expected):
    assert flat(given) == expected


def test_metrics_are_finite_numbers():
    numbers = {"a": 1, "b": np.float32(0.5), "g": np.int64(3)}
    others = {"c": math.inf, "d": True, "e": "1", "f": None}
    assert finite_numbers(numbers | others) == {"a": 1.0, "b": 0.5, "g": 3.0}


def test_each_call_of_a_function_is_a_run(tracker, tmp_path):
    """Arguments are its settings, the returned numbers its metrics, whatever their names are."""
    calls = ("example_calls:measure", "x=0..2", "text=a", "--run-dir", str(tmp_path / "r"))
    tracking = f"tracking=[{tracker}]"
    ended = command.in_process(InlineLauncher(), "map", *calls, tracking, environment={})
    assert ended.status == 1, ended.output
    assert "error: ValueError: two" in ended.output
    run, names = RunDirectory.at(tmp_path / "r"), [f"calls/text=a,x={x}" for x in range(3)]
    if tracker == "tensorboard":
        first = tensorboard(run, names[0])
        assert first.Scalars("acc#1 (%)")[0].value == 7
        assert "../val: top-5" in first.Tags()["scalars"]
        assert "../val: top-5" not in tensorboard(run, names[1]).Tags()["scalars"]
    if tracker == "mlflow":
        _, runs = mlflow_runs(run, "example_calls.measure")
        assert [runs[name].info.status for name in names] == ["FINISHED", "FINISHED", "FAILED"]
        assert runs[names[1]].data.params["x"] == "1"
        metrics = [dict(runs[name].data.metrics) for name in names]
        assert all(each.pop("duration_s") >= 0 for each in metrics)
        assert metrics[0] == {"acc_1 ___": 0.0, "acc_1 ____": 7.0, "___val_ top-5": 0.5}
        assert metrics[1] == {"acc_1 ___": 0.1, "acc_1 ____": 7.0}
        assert metrics[2] == {}
    if tracker == "wandb":
        files = wandb_runs(run)
        assert [files[name].exit_code for name in names] == [0, 0, 1]
        assert files[names[1]].config["x"] == 1
        assert files[names[0]].summary["acc#1 (%)"] == 7
