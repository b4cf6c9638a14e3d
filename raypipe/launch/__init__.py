"""The only place that knows Ray: clusters, training groups, fractional-CPU tasks."""
