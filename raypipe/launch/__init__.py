"""The only place that knows Ray: clusters, training groups, fractional-CPU tasks."""

import os

from raypipe.faults import VARIABLE

# Ray reads these when it is imported. A worker group polls and stops in tenths of a second, not
# seconds, and counts the nodes anew when it has waited ten seconds for its place. Who waits for a
# task on a node that vanished without a word notices in 85 seconds, not in seven minutes (Ray's
# servers allow a ping a minute). What Ray prints is for its developers, the user reads our
# progress and RUN_DIR/logs.
QUIET = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    "RAY_grpc_client_keepalive_time_ms": "65000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)


def fault_environment() -> dict[str, dict[str, str]]:
    """A Ray runtime environment that hands the rehearsed faults on to worker processes."""
    value = os.environ.get(VARIABLE)
    return {"env_vars": {VARIABLE: value}} if value else {}


def in_job() -> bool:
    """Whether this process was started by ``ray job submit``."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def in_cluster() -> bool:
    """Whether this process runs in a Ray cluster, or was given one's address."""
    return in_job() or bool(os.environ.get("RAY_ADDRESS"))
