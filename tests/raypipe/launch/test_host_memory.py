"""Ray's memory monitor kills who takes too much: in a cluster of its own with a low threshold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from raypipe.errors import UnitError
from raypipe.graph.launcher import PoolOptions
from raypipe.launch.cluster import RayLauncher
from tests.raypipe.examples.example_tasks import Regression
from tests.raypipe.launch.test_train import ignore, job

PROJECT = Path(__file__).resolve().parents[3]
# Ray and the training processes take less than the first; with the second they take more
ROOM_BYTES = 1.8e9
HUNGER_BYTES = 3.0e9


def eat() -> None:
    """Take memory until killed, or until it would be unkind."""
    taken = []
    for _ in range(20):
        taken.append(b"x" * int(HUNGER_BYTES / 20))
        time.sleep(0.1)
    time.sleep(20)


class Hungry(Regression):
    """Rank 1 eats at its third step."""

    def loss(self, model, batch, context):
        if context.step == 2 and dist.get_rank() == 1:
            eat()
        return super().loss(model, batch, context)


def main(folder: Path, how: str) -> None:
    """What the test starts: prints the kinds of failure."""
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + ROOM_BYTES) / memory.total
    os.environ.update(
        {"RAY_memory_usage_threshold": f"{limit:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    )
    launcher = RayLauncher()
    if how != "train":
        with launcher.pool(PoolOptions(1, keep_processes=how == "kept")) as pool:
            pool.submit("hungry", eat)
            kinds = [result.kind for result in pool.finished()]
    else:
        try:
            launcher.train(replace(job(folder, 4, 2, 2), task=Hungry()), ignore)
            kinds = []
        except UnitError as error:
            kinds = [error.kind]
    launcher.close()
    print(*kinds)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train", "task", "kept"])
def test_a_worker_killed_for_its_memory_is_told_apart(tmp_path, how):
    command = [sys.executable, "-m", "tests.raypipe.launch.test_host_memory", str(tmp_path), how]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == ["host_out_of_memory"], ended.stderr[-4000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
