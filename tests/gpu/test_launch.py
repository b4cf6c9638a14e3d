"""Ray on machines with GPUs: which devices tasks and trainings see."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_rig

TASKS = """
from raypipe import hardware
from raypipe.launch.cluster import RayLauncher
from raypipe.graph.launcher import PoolOptions

def seen():
    import torch
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    return [os.environ.get("CUDA_VISIBLE_DEVICES"), names, os.environ.get("CUDA_DEVICE_ORDER")]

launcher = RayLauncher()
found = {}
for name, options in {
    "cpu": PoolOptions(cpus=1),
    "gpu": PoolOptions(cpus=1, gpus=1),
    "actor": PoolOptions(cpus=1, keep_processes=True),
}.items():
    with launcher.pool(options) as pool:
        for task in range(2):
            pool.submit(f"{name}-{task}", seen)
        found[name] = sorted(pool.finished()[0].value for _ in range(2))
launcher._local = False  # as on a cluster that others started
found["node"] = [gpu.uuid for node in launcher.on_every_node(hardware.detect) for gpu in node.gpus]
launcher.close()
"""
SLICES = [f"MIG-22222222-2222-2222-2222-22222222{slice:02x}00" for slice in range(2)]


def test_a_task_sees_its_gpus_and_no_others(rig):
    """On a machine whose first card has two MIG slices and whose second card is lost."""
    machine = {"cards": 2, "name": "A100", "capability": "8.0"}
    found = rig.run(TASKS, lost="0;1", slices="2;-1", **machine)
    order = "PCI_BUS_ID"
    assert found["cpu"] == found["actor"] == [["", [], order]] * 2
    assert found["gpu"] == [[uuid, ["A100 MIG 1g"], order] for uuid in SLICES]
    assert found["node"] == SLICES


JOBS = """
import torch
from raypipe import hardware
from raypipe.errors import UnitError
from raypipe.launch.cluster import RayLauncher
from tests.gpu.rig.objects import OnCards, job_of

class Devices(OnCards):
    def evaluate(self, model, device, batch_size):
        parts = torch.cuda.memory_snapshot() if device.type == "cuda" else []
        return {
            "cuda": float(device.type == "cuda"), "count": float(torch.cuda.device_count()),
            "grows": float(bool(parts) and all(part["is_expandable"] for part in parts)),
        }

def outcome(launcher, workers, gpus):
    try:
        made = job_of(Devices(), 4, 4 // workers, workers, gpus=gpus)
        result = launcher.train(made, lambda row: None)
    except UnitError as error:
        return [error.kind, error.message]
    return [result["workers"], *(result[f"eval_{name}"] for name in ("cuda", "count", "grows"))]

cases, is_broken = given
if is_broken:
    before = hardware.detect()
    hardware.detect = lambda: before
    os.environ["RIG_CUDA"] = "12040"
launcher = RayLauncher()
found = [outcome(launcher, *case) for case in cases]
launcher.close()
"""


def test_trainings_run_on_the_devices_that_they_reserve(rig):
    cases = (1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)
    found = rig.run(JOBS, (cases, False), cards=2, name="A100;H100", capability="8.0;9.0")
    assert found == [
        [1, 0.0, 0.0, 0.0],
        [1, 1.0, 1.0, 1.0],  # a GPU, and segments of memory that grow
        [2, 0.0, 0.0, 0.0],
        [2, 1.0, 2.0, 1.0],  # Ray Train shows each worker the GPUs of the node's workers
    ]


def test_workers_whose_cuda_does_not_start_fail_with_one_line(rig):
    """As with a driver that was replaced after Ray had counted the GPUs."""
    one, two = rig.run(JOBS, (((1, 1.0), (2, 1.0)), True), cards=2)
    assert (one[0], two[0]) == ("error", "error")
    assert one[1].startswith("CUDA does not start: The NVIDIA driver on your system is too")
    assert two[1] == (
        "the worker group does not start: ValueError: "
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
    )
