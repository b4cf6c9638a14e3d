"""Declarations of the tables of a run: the core's, the sweep's and the experiment's."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

from raypipe.graph.experiment import Experiment
from raypipe.graph.tables import CORE
from raypipe.store import tables
from raypipe.store.tables import Column, Table, by_name
from raypipe.study.tables import TABLES as STUDIES
from raypipe.training.tables import with_metrics

if TYPE_CHECKING:
    from raypipe.report.headlines import Declarations, RunResults
    from raypipe.store.run_directory import RunDirectory


PREDICTIONS = Table(
    "card_predictions",
    "a prediction of `raypipe fit --card`: a training on a card, with the largest micro-batch that "
    "fits",
    (
        Column("stage", "text", "The training stage."),
        Column("profile", "text", "The profile of the configuration."),
        Column("card", "text", "The card."),
        Column("precision", "text", "Arithmetic: fp32, tf32, bf16 or fp16."),
        Column("workers", "integer", "Workers, one per card."),
        Column("strategy", "text", "Data parallelism: ddp or fsdp."),
        Column("gradient_checkpointing", "boolean", "Whether activations are recomputed."),
        Column("compile", "boolean", "Whether the model is compiled."),
        Column("optimizer", "text", "Optimizer."),
        Column("micro_batch", "integer", "Largest micro-batch that fits; none if 1 does not."),
        Column("accumulation", "integer", "Accumulation steps that keep the effective batch."),
        Column("effective_batch", "integer", "Samples per optimizer step, over all workers."),
        Column("peak_bytes", "integer", "Peak memory that torch reserves.", "B"),
        Column("parameters_bytes", "integer", "Of the peak: weights and buffers.", "B"),
        Column("gradients_bytes", "integer", "Of the peak: gradients and their buckets.", "B"),
        Column("optimizer_bytes", "integer", "Of the peak: state of the optimizer.", "B"),
        Column("activations_bytes", "integer", "Of the peak: results of the model's layers.", "B"),
        Column("logits_bytes", "integer", "Of the peak: the model's output and the loss.", "B"),
        Column("temporaries_bytes", "integer", "Of the peak: all other tensors.", "B"),
        Column("allocator_bytes", "integer", "Of the peak: reserved beyond tensors.", "B"),
        Column("context_bytes", "integer", "Beyond the peak: CUDA context and NCCL.", "B"),
        Column("capacity_bytes", "integer", "Memory of the card.", "B"),
        Column("step_time_s", "real", "Time of an optimizer step.", "s"),
        Column("samples_per_s", "real", "Samples per second, over all workers.", "1/s", "higher"),
        Column("samples_per_s_low", "real", "Lower end of its interval.", "1/s"),
        Column("samples_per_s_high", "real", "Upper end of its interval.", "1/s"),
        Column("mfu", "real", "Model FLOPs utilization: fraction of the cards' peak."),
        Column("hours", "real", "Time of all optimizer steps of the training.", "h"),
        Column("hours_low", "real", "Lower end of its interval.", "h"),
        Column("hours_high", "real", "Upper end of its interval.", "h"),
        Column("energy_kwh", "real", "Energy of the cards.", "kWh", "lower"),
        Column("cost", "real", "Price of the cards for these hours, if it is known.", "", "lower"),
        Column("measurements", "integer", "Measurements that calibrate the card; 0 for none."),
        Column("measured_samples_per_s", "real", "Speed of the same training, measured.", "1/s"),
        Column("measured_peak_bytes", "integer", "Peak memory of it, measured.", "B"),
        Column(
            "recommended",
            "boolean",
            "Whether it is the cheapest of its command; without prices, that of the least energy. "
            "Of a sweep's points the one that it would recommend.",
        ),
        Column("note", "text", "Whether it is calibrated, and why it does not fit."),
    ),
    optional=True,
)


def declared(experiment: Experiment) -> dict[str, Table]:
    """Return the declarations of an experiment's tables by name.

    Trials and steps also have the columns of the experiment's step metrics.
    """
    core = with_metrics(CORE, experiment.step_metrics)
    return by_name((*core, *STUDIES, PREDICTIONS, *experiment.tables))


def of_report(experiment: Experiment) -> Declarations:
    """Return what the report reads of an experiment."""
    from raypipe.report.headlines import Declarations

    core = {table.name for table in declared(experiment).values()}
    core -= {table.name for table in experiment.tables}
    return Declarations(
        sentence(experiment),
        experiment.tables,
        experiment.step_metrics,
        frozenset(core),
        experiment.asked,
    )


def about(run_dir: RunDirectory, experiment: Experiment | None = None) -> RunResults:
    """Read the results of a run; without its experiment, whose code is not needed for them.

    The experiment adds its description of itself, and the tables of logged steps.

    Raises:
        ConfigError: a table or the configuration is damaged.

    """
    from raypipe.report.headlines import Declarations, RunResults  # with matplotlib, slow to import

    try:
        configuration = run_dir.read(run_dir.config).decode(errors="replace")
    except FileNotFoundError:
        configuration = ""
    if experiment is not None:
        found, own = tables.read_tables(run_dir), of_report(experiment)
        return RunResults(found, configuration=configuration, declared=own, directory=run_dir)
    core = by_name((*CORE, *STUDIES, PREDICTIONS))
    known = {table.name: table for table in tables.declarations(run_dir)}
    left_out = {name for name, table in core.items() if table.partitioned}
    found = {name: tables.read_table(run_dir, name) for name in known if name not in left_out}
    own = Declarations(
        tables=[table for name, table in known.items() if name not in core],
        step_metrics=known["trials"].columns if "trials" in known else (),
        core=frozenset(core),
    )
    return RunResults(found, configuration=configuration, declared=own, directory=run_dir)


def sentence(experiment: Experiment) -> str:
    """Return the first line of the docstring of an experiment's module; empty without one.

    An experiment whose stages raypipe itself makes has none.
    """
    stages = inspect.unwrap(getattr(experiment.stages, "func", experiment.stages))  # of a partial
    module = getattr(stages, "__module__", "")
    if module.partition(".")[0] == "raypipe" or module not in sys.modules:
        return ""
    text = inspect.getdoc(sys.modules[module]) or ""
    return text.partition("\n")[0].strip()
