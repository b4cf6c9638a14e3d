"""Tables of studies: points of a search or a race, points and recommendation of a sweep."""

from __future__ import annotations

from raypipe.store.tables import Column, Table

SEARCH = Table(
    "search",
    "a point that a search of the matrix proposed; further columns are the metrics by name",
    (
        Column("number", "integer", "Number of the point, from 0, in the order of the proposals."),
        Column("point", "text", "Values of the searched keys, as JSON."),
        Column("status", "text", "running, succeeded, failed, or excluded (cannot be)."),
        Column("on_front", "boolean", "Whether no other one is better."),
        Column("ended", "integer", "Number of the points that ended before it."),
        Column("objectives", "text", "The optimized metrics, with min or max each, as JSON."),
        Column("message", "text", "Why it failed or cannot be."),
    ),
    internal=("metrics",),
    optional=True,
)

RACE = Table(
    "race",
    "a point of the matrix in a round of its race",
    (
        Column("round", "integer", "Number of the round, from 1."),
        Column("point", "text", "Values of the varied keys, as JSON."),
        Column("runs", "integer", "Number of its seeds in this round."),
        Column("mean", "real", "Mean of the metric over seeds."),
        Column("status", "text", "contender, dropped, winner or failed, after the round."),
        Column("p_holm", "real", "p-value of Wilcoxon's test against the best, after Holm."),
        Column("p_friedman", "real", "p-value of Friedman's test among the points of the round."),
    ),
    optional=True,
)

#: further columns are the sweep's axes, named by their dotted keys
SWEEP_POINTS = Table(
    "sweep_points",
    "a trial of a sweep, with the value of every axis in a column named by its dotted key",
    (
        Column("trial_id", "text", "The trial."),
        Column("trained_stage", "text", "The stage that it trains."),
        Column("kind", "text", "Kind of the sweep: systems or quality."),
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

TABLES = (SEARCH, RACE, SWEEP_POINTS, RECOMMENDATIONS)
