"""A script on Ray: leases, interruptions of the command, several processes, real frameworks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from raypipe.launch.cluster import RayLauncher
from tests import command
from tests.command import table, until
from tests.raypipe.scripts.conftest import write_configuration

EXAMPLES = Path(__file__).parents[3] / "examples" / "scripts"
WAIT_S = 300


def of_scripts(folder: Path) -> list[psutil.Process]:
    """The processes whose working directory is the folder, but for the commands'."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "train.py" in line and str(folder) in line and "raypipe" not in line:
                found.append(process)
    return found


def run(launcher: RayLauncher, folder: Path, run_dir: str = "run") -> None:
    """The command succeeds in this process, on the tests' cluster."""
    with contextlib.chdir(folder):
        words = ("run", "c.yaml", "--run-dir", run_dir)
        ended = command.in_process(launcher, *words, environment={})
    assert ended.status == 0, ended.output


def test_a_remote_run_directory_receives_the_output(launcher, folder):
    write_configuration(folder)
    run(launcher, folder, f"file://{folder}/remote")
    assert (folder / "remote/artifacts/train/model.txt").exists()
    assert list((folder / "remote/checkpoints/train").glob("*/state.json"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_script_survives_its_command(launcher, folder, number):
    write_configuration(folder, "--fail hang", grace_s=1)
    environment = {"RAYPIPE_CACHE": str(folder / "cache")}
    process = command.start(
        folder, "run", "c.yaml", "--run-dir", "run", environment=environment, start_new_session=True
    )
    saved = folder / "run/checkpoints/train"
    until(lambda: list(saved.glob("*/state.json")), "it saves", WAIT_S, process)
    assert of_scripts(folder)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    command.finish(process, -9 if number == signal.SIGKILL else 130, WAIT_S)
    until(lambda: not of_scripts(folder), "the scripts end", WAIT_S)
    run(launcher, folder)  # resumes: a fresh script would hang again
    assert sorted(table(folder / "run", "steps").step) == list(range(1, 13))


@pytest.mark.slow
def test_torchrun_starts_several_processes(launcher, folder):
    (folder / "train.py").write_text(
        "import json, sys\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "if dist.get_rank() == 0:\n"
        "    print(json.dumps({'step': 1, 'loss': total.item(), 'accum': int(sys.argv[2])}))\n"
        "dist.destroy_process_group()\n"
    )
    line = "torchrun --standalone --nproc-per-node {workers} train.py {micro_batch} {accumulation}"
    train = {"command": f"{line} {{steps}}", "metrics": "stdout"}
    scaling = {"workers": 2, "cpus_per_worker": 0.5}
    write_configuration(folder, scaling=scaling, **train)
    run(launcher, folder)
    (row,) = table(folder / "run", "trials").to_dict("records")
    assert (row["loss_final"], row["workers"], row["effective_batch"]) == (2.0, 2, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("plain", "torch"), ("trainer", "accelerate"), ("light", "lightning")]
)
def test_examples_of_the_guide(launcher, tmp_path, monkeypatch, name, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    for suffix in ("py", "yaml"):
        source = EXAMPLES / f"{name}.{suffix}"
        (tmp_path / source.name).write_text(source.read_text())
    (tmp_path / "c.yaml").write_text((EXAMPLES / f"{name}.yaml").read_text())
    run(launcher, tmp_path)
    steps = table(tmp_path / "run", "steps")
    assert len(steps) > 3
    assert steps.loss.notna().sum() > 3
    (row,) = table(tmp_path / "run", "trials").to_dict("records")
    assert row["eval_loss"] > 0
    assert row["loss_final"] < steps.sort_values("step").loss.dropna().iloc[0]
    assert row["samples_per_s"] > 0
    wanted = yaml.safe_load((tmp_path / "c.yaml").read_text())["train"]["training"]["steps"]
    assert row["steps"] in (wanted, wanted - 1)  # Lightning counts from 0
