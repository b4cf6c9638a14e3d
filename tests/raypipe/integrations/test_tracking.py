"""Trackers, read back with the packages' own readers."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from raypipe.errors import ConfigError
from raypipe.graph import tracking
from raypipe.graph.tracking import TrackerName, Trackers, check, finite_numbers, flat
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import write_table
from raypipe.training.tables import STEPS
from tests import command
from tests.scenario import cases

ALL: tuple[TrackerName, ...] = ("tensorboard", "mlflow", "wandb")
HERE = [name for name in ALL if all(map(tracking.file_of_module, tracking._PACKAGES[name]))]
CASE = cases(__file__, "trial")
TRIAL, OTHER = CASE["outcome"]["trial_id"], "train_large"


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


# reading what was written


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in one form: some trackers store only texts or numbers."""
    found = {name: value for name, value in settings.items() if not name.startswith("_")}
    for name, value in found.items():
        with suppress(ValueError):
            found[name] = float({"False": False}.get(value, value))
    return found


def shown(
    points: Iterable[tuple[str, int, float]], settings: Mapping[str, Any], *ended: Any
) -> SimpleNamespace:
    """A trial as a tracker has it, each step once."""
    curves: dict[str, dict[int, Any]] = defaultdict(dict)
    for metric, step, value in points:
        assert step not in curves[metric], "a step came twice"
        curves[metric][step] = pytest.approx(value)
    return SimpleNamespace(curves=curves, settings=plain(settings), ended=ended)


def tensorboard_trials(run: RunDirectory) -> Iterator[tuple[str, SimpleNamespace]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for folder in Path(run.tracking, "tensorboard").iterdir():
        events = EventAccumulator(str(folder)).Reload()
        content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        chosen = HParamsPluginData.FromString(content).session_start_info.hparams
        settings = {name: getattr(v, v.WhichOneof("kind")) for name, v in chosen.items()}
        (text,) = events.Tensors("configuration/text_summary")
        lines = text.tensor_proto.string_val[0].decode().splitlines()
        configuration = dict(line.strip().split(": ", 1) for line in lines)
        metrics = events.Tags()["scalars"]
        points = ((name, e.step, e.value) for name in metrics for e in events.Scalars(name))
        status = settings.pop("status")
        yield folder.name, shown(points, configuration | settings, status)


def mlflow_trials(run: RunDirectory) -> Iterator[tuple[str, SimpleNamespace]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.path('tracking', 'mlflow.db')}")
    experiments = {each.experiment_id: each.name for each in client.search_experiments()}
    for entry in client.search_runs(list(experiments)):
        info, data = entry.info, entry.data
        assert info.run_name == data.tags["raypipe.trial_id"]
        histories = [client.get_metric_history(info.run_id, name) for name in data.metrics]
        points = ((each.key, each.step, each.value) for found in histories for each in found)
        place = experiments[info.experiment_id], data.tags["raypipe.run_id"]
        ended = data.tags["raypipe.status"], info.status, *place
        yield info.run_name, shown(points, data.params, *ended)


def wandb_trials(run: RunDirectory) -> Iterator[tuple[str, SimpleNamespace]]:
    """What ``wandb sync`` would send."""
    ids = set()
    for file in Path(run.tracking, "wandb").glob("*/run-*.wandb"):
        config, summary, points, step = {}, {}, [], 0
        for record in wandb_records(file.read_bytes()):
            if record.HasField("run"):
                about = record.run
                config |= values(about.config.update)
            elif record.HasField("config"):
                config |= values(record.config.update)
            elif record.HasField("summary"):
                summary |= values(record.summary.update)
            elif record.HasField("history"):
                row = values(record.history.item)
                step = row.pop("_step")
                points += [(metric, step, value) for metric, value in row.items()]
            elif record.HasField("exit"):
                code = record.exit.exit_code
        assert about.run_id not in ids
        ids.add(about.run_id)
        known = {metric for metric, *_ in points}
        last = [each for each in finite_numbers(summary).items() if each[0] not in known]
        points += [(metric, step, value) for metric, value in last if metric[0] != "_"]
        ended = summary["status"], code, about.project, about.run_group
        yield about.display_name, shown(points, config, *ended)


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


READERS = {"tensorboard": tensorboard_trials, "mlflow": mlflow_trials, "wandb": wandb_trials}


def trials_in(tracker: str, run: RunDirectory) -> dict[str, SimpleNamespace]:
    """What a tracker shows, by trials, whose names are those of files."""
    found = list(READERS[tracker](run))
    trials = {name.replace("/", "-"): trial for name, trial in found}
    assert len(trials) == len(found), "a trial is there twice"
    return trials


# a run whose driver is killed, and is continued in another process


def reach_this_machine(
    sock: socket.socket, address: Any, connect: Any = socket.socket.connect
) -> Any:
    assert sock.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost"), address
    return connect(sock, address)


def drive(tracker: TrackerName) -> None:
    """Run without network in the folder ``run``, as a driver that is killed and as the next one."""
    socket.socket.connect = reach_this_machine  # type: ignore[method-assign]
    if tracker == "tensorboard":
        import torch.utils.tensorboard  # noqa: F401 - once for both
    run = RunDirectory.at("run")
    if child := os.fork():
        _, ended = os.waitpid(child, 0)
        assert os.WTERMSIG(ended) == signal.SIGKILL
    with Trackers([tracker], run, "quick-1", "quick", CASE["configuration"]) as trackers:
        if not child:
            for step in range(1, 7):
                trackers.log(TRIAL, row(step))
                trackers.log(OTHER, row(step, OTHER))
            trackers.end(OTHER, {"stage": OTHER, "status": "out_of_memory", "micro_batch": 8})
            write_table(run, STEPS, [row(step) for step in (1, 2, 3)], "quick-1", TRIAL)
            os.kill(os.getpid(), signal.SIGKILL)
        # from the checkpoint at step 3; once more from one at step 7
        for step in (*range(4, 11), *range(8, 13)):
            trackers.log(TRIAL, row(step, speed=20.0))
        trackers.end(TRIAL, CASE["outcome"])
        write_table(run, STEPS, [row(s, OTHER) for s in range(1, 7)], "quick-1", OTHER)
        for step in (7, 8):
            trackers.log(OTHER, row(step, OTHER))
        trackers.end(OTHER, {"stage": OTHER, "status": "succeeded", "micro_batch": 4, "steps": 8})
        trackers.log("interrupted", row(1))


def needs(name: TrackerName) -> pytest.MarkDecorator:
    missing = name not in HERE
    return pytest.mark.skipif(
        missing, reason=f"needs {name}: pip install 'raypipe-runner[tracking]'"
    )


#: the packages of mlflow and W&B take seconds to load
TRACKERS = [
    pytest.param(name, marks=[needs(name), *[pytest.mark.slow] * (name != "tensorboard")])
    for name in ALL
]
#: how each says that a trial succeeded, or not
ENDED = {"tensorboard": [(), ()], "mlflow": [("FINISHED",), ("KILLED",)], "wandb": [(0,), (1,)]}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_shows_each_step_of_a_killed_run_once(tracker, tmp_path):
    words = [sys.executable, "-c", f"from {__name__} import drive; drive({tracker!r})"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == "", "a package says something, or a tracker failed"
    run = RunDirectory.at(tmp_path / "run")
    trials, (good, bad) = trials_in(tracker, run), ENDED[tracker]
    place = () if tracker == "tensorboard" else ("quick", "quick-1")
    trial, other = trials.pop(TRIAL.replace("/", "-")), trials.pop(OTHER)
    assert trial.ended == other.ended == ("succeeded", *good, *place)
    assert {name: each.ended for name, each in trials.items()} == {
        "interrupted": ("interrupted", *bad, *place)
    }
    assert trial.curves["loss"] == {step: 1 / step for step in range(1, 13)}
    assert other.curves["loss"] == {step: 1 / step for step in range(1, 9)}
    assert 2 not in trial.curves["grad_norm"]  # it was no number
    held_out = "eval_p_1" if tracker == "mlflow" else "eval_p@1"
    assert trial.curves[held_out] == dict.fromkeys(range(2, 13, 2), 0.5)
    assert trial.curves["final/samples_per_s"] == {12: 123.0}
    assert trial.settings == plain(CASE["shown"])
    assert other.settings["micro_batch"] == 4  # of the last attempt
    # nothing lies elsewhere, and no secret is in any file
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "CACHE", "CONFIG", "DATA"}
    assert {path.name for path in Path(run.path()).iterdir()} == {"tracking", "results"}
    files = [file.read_bytes() for file in Path(run.tracking).rglob("*") if file.is_file()]
    assert files
    assert not any(secret in file for file in files for secret in (b"hf_abcdef", b"pa55"))


# a tracker that fails


@pytest.fixture
def made(monkeypatch) -> list[Mock]:
    """What was opened; one tracker works, one fails at its second step, one is interrupted."""
    full = OSError(28, "No space left on device: http://me:pa55@server")
    made: list[Mock] = []

    def opened(writes: Any, *_: object) -> Mock:
        made.append(Mock(**{"last": -1, "write.side_effect": writes}))
        return made[-1]

    writes = {"mlflow": [None, full], "tensorboard": None, "wandb": KeyboardInterrupt}
    kinds = {name: partial(opened, effect) for name, effect in writes.items()}
    monkeypatch.setattr(tracking, "_KINDS", kinds)
    monkeypatch.setattr(tracking, "file_of_module", lambda package: True)
    return made


def received(calls: Mock) -> list[Any]:
    """The steps or statuses that a tracker was called with."""
    return [call.args[0] for call in calls.mock_calls]


def test_a_failing_tracker_is_given_up_and_the_others_go_on(run, made, caplog):
    with Trackers(["mlflow", "tensorboard"], run, "quick-1", "quick", {}) as trackers:
        for step in (1, 2, 3):
            trackers.log("a", row(step))
        trackers.end("a", {"status": "succeeded"})
        trackers.log("b", row(1))
    assert [(received(each.write), received(each.end)) for each in made] == [
        ([1, 2], []),
        ([1, 2, 3], ["succeeded"]),
        ([1], ["interrupted"]),
    ]
    (warning,) = caplog.messages
    assert "mlflow failed" in warning
    assert "No space left" in warning
    assert "pa55" not in warning


def test_a_continued_run_sends_no_step_that_wandb_has(monkeypatch):
    kept = Mock(step=3)
    monkeypatch.setitem(sys.modules, "wandb", Mock(init=lambda **_: kept))
    trial = tracking.WandbTrial(Mock(run=Mock(is_local=False), configuration={}), "a")
    for step in (1, 2, 3):
        trial.write(step, {"loss": 1.0})
    kept.log.assert_called_once_with({"loss": 1.0}, step=3, commit=True)


def test_an_interrupt_is_not_taken_for_a_failure(run, made):
    with (
        pytest.raises(KeyboardInterrupt),
        Trackers(["wandb"], run, "quick-1", "quick", {}) as trackers,
    ):
        trackers.log("a", row(2))
    assert [received(each.end) for each in made] == [["interrupted"]]


@pytest.mark.slow
@needs("mlflow")
def test_the_server_of_the_environment_is_used(remote, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/server.db")
    monkeypatch.chdir(tmp_path)
    with Trackers(["mlflow"], remote, "quick-1", "quick", {}) as trackers:
        trackers.log("a", row(1))
    assert Path(tmp_path, "server.db").exists()
    assert not remote.exists(remote.tracking)


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


@pytest.mark.parametrize(("name", "variable", "value", "hint"), CASE["servers"])
def test_a_remote_run_directory_needs_a_server(remote, name, variable, value, hint, monkeypatch):
    monkeypatch.setattr(tracking, "file_of_module", lambda package: True)
    with pytest.raises(ConfigError, match=hint):
        check([name], remote)
    if variable is not None:
        monkeypatch.setenv(variable, value)
        check([name], remote)


# values


def test_settings_are_flat_and_free_of_secrets():
    assert flat(CASE["nested"]) == CASE["flat"]


def test_metrics_are_finite_numbers():
    numbers = {"a": 1, "b": np.float32(0.5), "g": np.int64(3)}
    others = {"c": math.inf, "d": True, "e": "1", "f": None}
    assert finite_numbers(numbers | others) == {"a": 1.0, "b": 0.5, "g": 3.0}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_each_call_of_a_function_is_a_run(tracker, tmp_path):
    """Arguments are its settings, the returned numbers its metrics, whatever their names are."""
    calls = ("example_calls:measure", "x=0..2", "text=a", "--run-dir", str(tmp_path / "r"))
    tracking = f"tracking=[{tracker}]"
    ended = command.in_process(InlineLauncher(), "map", *calls, tracking, environment={})
    assert ended.status == 1, ended.output
    assert "error: ValueError: two" in ended.output
    trials = trials_in(tracker, RunDirectory.at(tmp_path / "r"))
    found = [trials[f"calls-text=a,x={x}"] for x in range(3)]
    good, bad = ENDED[tracker]
    assert [each.ended[0] for each in found] == ["succeeded", "succeeded", "failed"]
    codes = [each.ended[1 : 1 + len(good)] for each in found]
    assert codes == [good, good, ("FAILED",) if tracker == "mlflow" else bad]
    assert [each.settings["x"] for each in found] == [0, 1, 2]
    names = ("acc@1 (%)", "acc#1 (%)", "../val: top-5")
    if tracker == "mlflow":
        names = ("acc_1 ___", "acc_1 ____", "___val_ top-5")
    for trial, expected in zip(found, [(0.0, 7, 0.5), (0.1, 7), ()], strict=True):
        trial.curves.pop("duration_s")
        assert trial.curves == {n: {0: v} for n, v in zip(names, expected, strict=False)}
