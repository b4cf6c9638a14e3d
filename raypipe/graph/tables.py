"""Tables of the pipeline: stages, failures and the environment of each command."""

from __future__ import annotations

from typing import get_args

from raypipe.errors import FailureKind
from raypipe.provenance import PACKAGES
from raypipe.store.tables import Column, Table
from raypipe.training.tables import TABLES as TRAINING_TABLES

STAGES = Table(
    "stages",
    "a stage's outcome",
    (
        Column("stage", "text", "Name of the stage."),
        Column("status", "text", "succeeded, failed, out_of_memory, interrupted or skipped."),
        Column("started_at", "time", "When it started first."),
        Column("duration_s", "real", "Time in all commands that computed its results.", "s"),
        Column("device", "text", "Name of the GPU it worked on, or cpu."),
        Column("gpu_peak_bytes", "integer", "Peak memory allocated by torch on a GPU.", "B"),
    ),
)

FAILURES = Table(
    "failures",
    "a failed attempt",
    (
        Column("stage", "text", "The stage."),
        Column("unit", "text", "The unit or task that failed."),
        Column("attempt", "integer", "Number of the attempt, from 1."),
        Column("kind", "text", f"One of {', '.join(get_args(FailureKind))}."),
        Column("message", "text", "The error in a few words."),
        Column("frame", "text", "Last frame of the user's code: file:line in function."),
        Column("traceback", "text", "Traceback from the user's code on; none if a worker died."),
        Column("log", "text", "Its log in RUN_DIR/logs, with the output and the traceback."),
        Column("outcome", "text", "What happened next."),
        Column("at", "time", "When it was recorded."),
    ),
    shown=("kind", "message", "unit", "stage", "attempt"),
)

ENVIRONMENT = Table(
    "environment",
    "a node that took part in a command",
    (
        Column("hostname", "text", "Name of the node."),
        Column("command", "text", "The command, with credentials redacted."),
        Column("started_at", "time", "When the command started."),
        Column("git_commit", "text", "Commit of the directory that the command ran in."),
        Column("git_dirty", "boolean", "Whether files differed from the commit."),
        Column("cpus", "integer", "Cores that processes may run on."),
        Column("memory_bytes", "integer", "Memory of the node.", "B"),
        Column("gpus", "text", "Names of the GPUs."),
        Column("gpu_count", "integer", "Number of GPUs."),
        Column("gpu_memory_bytes", "integer", "Memory of all GPUs.", "B"),
        Column("gpu_driver", "text", "Version of the NVIDIA driver."),
        Column("cuda_driver", "text", "CUDA version that the driver supports."),
        Column("cuda", "text", "CUDA version that torch was built for."),
        Column("platform", "text", "Operating system."),
        Column("python", "text", "Version of Python."),
        Column("raypipe", "text", "Version of raypipe."),
        *(Column(name.replace("-", "_"), "text", f"Version of {name}.") for name in PACKAGES),
    ),
)

VARIANTS = Table(
    "variants",
    "a value of a variant of the matrix",
    (
        Column("key", "text", "The varied key, or `seed` for repetitions."),
        Column("value", "text", "Its value; text as it is, anything else as JSON."),
        Column("number", "real", "The value, if it is a number."),
    ),
)

VARIANT_METRICS = Table(
    "variant_metrics",
    "a metric at a value of an axis of the matrix",
    (
        Column("metric", "text", "Table, column and what tells its rows apart."),
        Column("axis", "text", "The varied key."),
        Column("value", "text", "Its value."),
        Column("seeds", "integer", "Seeds with a number, each averaged over the other axes."),
        Column("unmatched", "integer", "Numbers without a counterpart at another value."),
        Column("mean", "real", "Mean over seeds."),
        Column("std", "real", "Standard deviation over seeds."),
        Column("low", "real", "Lower end of Student's 95 % confidence interval of the mean."),
        Column("high", "real", "Upper end of the interval."),
    ),
)

VARIANT_TESTS = Table(
    "variant_tests",
    "a paired test of two values of an axis of the matrix",
    (
        Column("metric", "text", "As in `variant_metrics`."),
        Column("axis", "text", "The varied key."),
        Column("first", "text", "A value of the axis."),
        Column("second", "text", "Another value."),
        Column("n", "integer", "Seeds at which both have a number at a point of the other axes."),
        Column("dropped", "integer", "Seeds without such a pair."),
        Column("equal", "integer", "Seeds with equal numbers."),
        Column("statistic", "real", "Statistic of Wilcoxon's signed-rank test."),
        Column("p_value", "real", "Its two-sided p-value."),
        Column("effect", "real", "Rank-biserial correlation of pairs; negative: first is lower."),
        Column("p_holm", "real", "p-value corrected by Holm over the metric's pairs on the axis."),
        Column("conclusion", "text", "The lower value, or that none can be told and why."),
    ),
)

#: the tables that every run has
CORE = (
    STAGES,
    *TRAINING_TABLES,
    FAILURES,
    ENVIRONMENT,
    VARIANTS,
    VARIANT_METRICS,
    VARIANT_TESTS,
)
