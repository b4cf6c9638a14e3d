"""Ray backend: clusters, worker groups and tasks. No other package imports Ray."""

import gc
import os
from collections.abc import Mapping
from typing import Any

from raypipe import import_path
from raypipe.faults import VARIABLE

import_path.adopt()  # the first of raypipe's modules that a worker imports

# Imports and the parsing of corpora create millions of objects that stay. With Python's thresholds,
# collecting among them takes a fifth of a worker's start. A command sets its own.
gc.set_threshold(50_000, 20, 100)

#: variable of Ray: whether a task without GPUs sees none ("1"), or those that its node sees ("0")
ZERO_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"

# Ray reads these variables on import. A worker group polls and stops in tenths of a second, not
# seconds. After a failure Ray ends it: workers that wait in an exchange have a second, not thirty,
# and five more that cannot be set. A caller notices a node that vanished silently after 85 seconds,
# not seven minutes (Ray's servers allow one ping per minute). Ray's messages address its
# developers; users read raypipe's progress and RUN_DIR/logs. Ray ends a worker beyond the number of
# CPUs once it is idle for a second; it is half a minute here, since the next training would start
# a worker and import torch again.
QUIET = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",
    "RAY_grpc_client_keepalive_time_ms": "65000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "30000",
    ZERO_GPUS: "1",
    # repeated paragraphs about dead workers are held back, and printed after a command's last line
    "RAY_DEDUP_LOGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}
# Threads of OpenMP wait for each other by spinning, by default 300,000 times. On busy cores that
# makes a small training with two threads three to ten times slower. On idle cores, spinning less
# costs it a tenth.
# GPUs are numbered by the PCI bus, as in NVML; CUDA's own order puts the fastest first.
ENVIRONMENT = {**QUIET, "GOMP_SPINCOUNT": "3000", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def leave_out_imports() -> None:
    """Leave all objects that this process has now out of later collections of garbage.

    Each training collects garbage. Among all that torch imports, that takes longer than a small
    training.
    """
    gc.collect()
    gc.freeze()


def runtime_environment(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a Ray runtime environment of these variables and of fault injection, if any."""
    faults = {VARIABLE: value} if (value := os.environ.get(VARIABLE)) else {}
    return {"env_vars": {**faults, **variables}} if faults or variables else None


def in_job() -> bool:
    """Whether ``ray job submit`` started this process."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def in_cluster() -> bool:
    """Whether this process runs in a Ray cluster, or ``RAY_ADDRESS`` names one."""
    return in_job() or bool(os.environ.get("RAY_ADDRESS"))
