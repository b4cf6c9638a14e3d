"""Tables of a sweep: its points, Pareto front and recommendation."""

from __future__ import annotations

from raypipe.store.tables import Column, Table

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
        Column("trial_id", "text", "A trial of the recommended point."),
        Column("metric", "text", "The metric that is compared."),
        Column("mode", "text", "Whether the metric is minimized or maximized."),
        Column("value", "real", "Median of the metric over measurements, and mean over seeds."),
        Column("value_low", "real", "Least measured value of the point."),
        Column("value_high", "real", "Greatest measured value of the point."),
        Column("reason", "text", "Why this point."),
        Column("snippet", "text", "The settings as YAML."),
    ),
    internal=("settings",),
    optional=True,
)

TABLES = (SWEEP_POINTS, PARETO, RECOMMENDATIONS)
