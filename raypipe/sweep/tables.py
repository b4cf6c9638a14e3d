"""Tables of a sweep: its points and rounds, memory models, Pareto front and recommendation."""

from __future__ import annotations

from raypipe.storage.tables import Column, Table

#: further columns are the sweep's axes, named by their dotted keys
SWEEP_POINTS = Table(
    "sweep_points",
    "a trial of a sweep, with the value of every axis in a column named by its dotted key",
    (
        Column("trial_id", "text", "The trial."),
        Column("trained_stage", "text", "The stage that it trains."),
        Column("kind", "text", "Kind of the sweep: systems or quality."),
        Column("reference", "boolean", "Whether it is the fp32 reference."),
    ),
    optional=True,
)

SWEEP_ROUNDS = Table(
    "sweep_rounds",
    "a measurement of a trial of a sweep of kind=systems; in a round each point that may be the "
    "best is measured once",
    (
        Column("trial_id", "text", "The trial."),
        Column("trained_stage", "text", "The stage that it trains."),
        Column("round", "integer", "Number of the round; the first measures every trial."),
        Column("place", "integer", "Place of the measurement within its round, from 0."),
        Column("status", "text", "succeeded, or why there is no speed: out_of_memory, failed."),
        Column("samples_per_s", "real", "Samples per second, over all workers.", "1/s", "higher"),
        Column("tokens_per_s", "real", "Tokens per second, over all workers.", "1/s"),
        Column("step_time_s", "real", "Time of an optimizer step.", "s"),
        Column("flops_per_s", "real", "Model FLOPs per second, over all workers.", "1/s"),
        Column("mfu", "real", "Model FLOPs utilization: fraction of the devices' peak."),
        Column("energy_j", "real", "Energy of the GPUs.", "J"),
        Column("energy_j_per_sample", "real", "Energy per sample after warm-up.", "J"),
        Column("speed_spread", "real", "Range of the speed within the measurement, relative."),
        Column("load", "real", "Load average of the last minute per core, at the start."),
        Column("started_at", "time", "When it started."),
        Column("duration_s", "real", "Time with start and warm-up.", "s"),
    ),
    optional=True,
)

MEMORY_FITS = Table(
    "memory_fits",
    "a memory model: peak bytes = static_bytes + bytes_per_sample x micro-batch",
    (
        Column("group", "text", "The trials that share all settings but the micro-batch."),
        Column("trained_stage", "text", "The stage that they train."),
        Column("device", "text", "Name of the GPU."),
        Column("precision", "text", "Arithmetic."),
        Column("gradient_checkpointing", "boolean", "Whether activations were recomputed."),
        Column("compile", "boolean", "Whether the model was compiled."),
        Column("strategy", "text", "Data parallelism."),
        Column("workers", "integer", "Workers."),
        Column("accumulates", "boolean", "Whether gradients are accumulated."),
        Column("static_bytes", "integer", "Memory without any sample.", "B"),
        Column("bytes_per_sample", "integer", "Memory per sample of the micro-batch.", "B"),
        Column("trials", "integer", "Trials that the model is fitted to."),
        Column("largest_error", "real", "Largest relative error at one of them."),
        Column("capacity_bytes", "integer", "Memory of the GPU.", "B"),
        Column("largest_micro_batch", "integer", "Largest micro-batch that is predicted to fit."),
        Column("failed_micro_batch", "integer", "Smallest micro-batch that ran out of memory."),
    ),
    optional=True,
)

PARETO = Table(
    "pareto",
    "a trial on the Pareto front of speed, memory, energy and, of kind=quality, the metric",
    (
        Column("trained_stage", "text", "The stage that it trains."),
        Column("trial_id", "text", "The trial."),
        Column("samples_per_s", "real", "Samples per second.", "1/s"),
        Column("energy_j_per_sample", "real", "Energy per sample after warm-up.", "J"),
        Column("peak_bytes", "integer", "Peak memory of the device.", "B"),
        Column("metric", "text", "The measure of quality, for kind=quality."),
        Column("quality", "real", "Its value."),
    ),
    optional=True,
)

RECOMMENDATIONS = Table(
    "recommendations",
    "the recommended point of a sweep",
    (
        Column("trained_stage", "text", "The stage that was swept."),
        Column("trial_id", "text", "The trial nearest to the recommended point's mean."),
        Column("metric", "text", "The metric that is compared."),
        Column("mode", "text", "Whether the metric is minimized or maximized."),
        Column("value", "real", "Mean of the metric."),
        Column("value_low", "real", "Lower end of the 95 % confidence interval of the value."),
        Column("value_high", "real", "Upper end of it."),
        Column("rounds", "integer", "Measurements of the point."),
        Column("runner_up", "text", "The best of the other points."),
        Column("ratio", "real", "Metric of the point relative to the runner-up's."),
        Column("ratio_low", "real", "Lower end of the interval of the ratio that decides."),
        Column("ratio_high", "real", "Upper end of it."),
        Column("decided", "boolean", "Whether no other point can be better by more than a trifle."),
        Column("noise", "real", "Standard deviation of the ratio from round to round, relative."),
        Column("load", "real", "Mean load average per core during the measurements."),
        Column("edges", "text", "Axes whose best value is the last of those that were tried."),
        Column("longer", "text", "Overrides with which an undecided sweep goes on."),
        Column("reason", "text", "Why this point."),
        Column("snippet", "text", "The settings as YAML."),
    ),
    internal=("settings",),
    optional=True,
)

TABLES = (SWEEP_POINTS, SWEEP_ROUNDS, MEMORY_FITS, PARETO, RECOMMENDATIONS)
