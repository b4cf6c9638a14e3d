"""The stage ``sweep``, and training stages that use its recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from raypipe.errors import ConfigError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.graph.stages import train
from raypipe.hardware import Hardware
from raypipe.store import tables as results
from raypipe.store.ledger import Row
from raypipe.study.metric import Objective, declared_columns, with_metric
from raypipe.study.population import check_pauses
from raypipe.study.recommendation import (
    front,
    medians,
    peak_bytes,
    recommend,
    snippet,
)
from raypipe.study.sweep import Sweep
from raypipe.study.sweep_settings import SWEEP
from raypipe.study.trials import (
    Trial,
    TrialMaker,
    check_counts_steps,
    shown,
    training_stage,
    without_training,
)
from raypipe.training.batching import KEYS
from raypipe.training.settings import TrainStageSettings


def with_sweep(configuration: Configuration, nodes: Sequence[Hardware]) -> list[Stage]:
    """Return the stages of a configuration, the sweep before the stages that use its winner.

    There is no sweep of a training that this run leaves out because its model is given.

    Raises:
        ConfigError: the swept stage is not a training stage, an axis has invalid values, no trial
            has the metric, or a stage takes its settings from a sweep of another stage.

    """
    plain, sweep = list(configuration.stages()), configuration.settings.sweep
    takers = [s.name for s in plain if s.training is not None and s.training.settings.from_sweep]
    for name in takers:
        if sweep is None or sweep.stage != name:
            raise ConfigError(
                f"{configuration.origin}: {name}.from_sweep = true: there is no sweep of it "
                f"(set sweep.stage: {name} and sweep.axes)"
            )
    if sweep is None or _is_given(configuration, plain, sweep.stage):
        return plain
    tried, swept = training_stage(plain, sweep.stage, f"{configuration.origin}: sweep.stage")
    sweep = with_metric(configuration, swept)
    if sweep.kind == "systems":
        where = f"{configuration.origin}: {sweep.stage}.command"
        check_counts_steps(swept, where, "a systems sweep", ", or kind: quality")
    maker = TrialMaker(configuration, sweep, nodes)
    axes = {maker.key(name): axis for name, axis in sweep.axes.items()}
    check_pauses(sweep.model_copy(update={"axes": axes}), swept, configuration.origin)
    given = [] if sweep.is_searched else maker.trials()
    units = [trial.unit for trial in given]
    last = _last_unit(maker, units)

    def run(context: StageContext) -> None:
        trials, objective = given, Objective(sweep, declared_columns(configuration))
        if sweep.is_searched:
            rows = [r for r in context.ledger.rows("trials") if r.get("search") == last.key]
            rows.sort(key=lambda row: row["number"])
            trials = [t for row in rows if (t := maker.trial(row["point"])) is not None]
        search = last.key if sweep.is_searched else ""
        under_way = Sweep(context, maker, trials, objective, search)
        context.session.launcher.trials(under_way, sweep, context.run_dir)
        if under_way.mistake is not None:
            raise under_way.mistake
        _summarize(context, maker, under_way.trials, objective)
        if under_way.failed:
            raise next(iter(under_way.failed.values()))
        context.finish(last.key)

    steps = sweep.steps + sweep.warmup_steps if sweep.kind == "systems" else None
    number = sweep.samples if sweep.is_searched else len(given)
    workload = f"{number * sweep.measurements} trials" + (f" of {steps} steps" if steps else "")
    units = [*units, last]
    measures = sweep.kind == "systems" and maker.device[0] == "cpu"
    stage = Stage(
        SWEEP,
        run,
        units,
        tried.needs,
        (),
        workload,
        on_gpu=tried.on_gpu,
        alone=measures,
    )
    place = [each.name for each in plain].index(sweep.stage)
    together = [*plain[:place], stage, *plain[place:]]
    return [_taking(s, maker) if s.name in takers else s for s in together]


def _is_given(configuration: Configuration, stages: Sequence[Stage], name: str) -> bool:
    """Whether a stage has the settings of a training, but its model ships and is not trained."""
    section = getattr(configuration.settings, name, None)
    found = [stage for stage in stages if stage.name == name and stage.training is None]
    return isinstance(section, TrainStageSettings) and bool(found)


def _last_unit(maker: TrialMaker, units: Sequence[Unit]) -> Unit:
    """Return the unit that ends a sweep: the verdict on its trials, or its search."""
    sweep, stages = maker.sweep, maker.configuration.stages()
    of_trial = maker.identity(*training_stage(stages, sweep.stage, "sweep.stage"))
    literals = {**of_trial.literals, **sweep.model_dump(mode="json", exclude={"concurrent"})}
    if sweep.is_searched:
        del literals["samples"]
    else:
        literals["trials"] = [unit.key for unit in units]
    identity = Identity.of(of_trial.shared, literals, of_trial.needs)
    kind = "search" if sweep.is_searched else "verdict"
    key = f"{SWEEP}/{sweep.stage}/{kind}-{identity.fingerprint[:12]}"
    if not sweep.is_searched:
        return Unit(key, identity=identity)
    return Unit(key, budget=sweep.samples, budget_key="sweep.samples", identity=identity)


def _taking(stage: Stage, maker: TrialMaker) -> Stage:
    """Return the training stage with the settings that the sweep recommends.

    Its identity says that the settings come from the sweep, not what they are: when a sweep grows,
    a model that was trained before stays valid. Its features are unknown before the sweep.
    """
    training, origin = stage.training, maker.configuration.origin
    if training is None:
        raise ValueError(f"{stage.name} is not a training stage")
    swept = {maker.key(name) for name in maker.sweep.axes}
    decided = {
        key: value
        for key, value in training.settings.training.identity().items()
        if f"{stage.name}.training.{key}" not in swept
    }
    rest = without_training(stage)
    own = {**rest.shared[stage.name], "training": decided, "from_sweep": sorted(swept)}
    identity = Identity.of({**rest.shared, stage.name: own}, rest.literals, rest.needs)
    unit = Unit(stage.name, identity=identity, extents=stage.units[0].extents)

    def run(context: StageContext) -> None:
        if (row := context.ledger.get("recommendations", stage.name)) is None:
            text = "the sweep recommends nothing: no point succeeded"
            raise UnitError(stage.name, "error", text)
        values = dict(row["settings"])
        context.say(f"takes from the sweep {shown(values)}")
        varied = maker.configuration.with_values(values, f"{origin}: the sweep's recommendation")
        _, found = training_stage(varied.stages(), stage.name, "sweep.stage")
        train(context, unit, found.task(context.run_dir), found.settings, found.initial)

    needs = (*stage.needs, SWEEP)
    return replace(stage, run=run, units=[unit], needs=needs)


def _summarize(
    context: StageContext,
    maker: TrialMaker,
    trials: Sequence[Trial],
    objective: Objective,
) -> None:
    """Write the sweep's results: parity, Pareto front and recommendation."""
    settings = maker.sweep
    rows = record_parity(context, trials)
    quality = objective.column if settings.kind == "quality" else None
    qualities = {objective.column: objective.mode} if quality else {}
    best = front(medians(rows.values()), qualities | settings.further_metrics)
    columns = ("trained_stage", "trial_id", "samples_per_s", "energy_j_per_sample")
    context.ledger.remove("pareto", rows)
    context.ledger.put(
        "pareto",
        {
            row["trial_id"]: {name: row.get(name) for name in columns}
            | {"peak_bytes": peak_bytes(row), "metric": quality}
            | {"quality": row[quality] if quality else None}
            for row in best
        },
    )
    # `--local` runs it in one worker, with more accumulation
    given = {trial.unit.key: trial.training.settings.training for trial in trials}
    found = recommend(
        [
            {**row, **{k: v for k in KEYS if (v := getattr(given[key], k))}}
            for key, row in rows.items()
        ],
        objective.column,
        objective.mode,
        settings.parity_tolerance,
        maker.device[1],
    )
    if isinstance(found, str):
        context.ledger.remove("recommendations", [settings.stage])
        context.say(f"nothing is recommended: {found}")
        return
    row = {
        **{"trained_stage": settings.stage, "trial_id": found.trial["trial_id"]},
        **{"metric": objective.column, "mode": objective.mode, "value": found.value},
        **{"value_low": found.low, "value_high": found.high, "reason": found.reason},
        **{"settings": found.settings, "snippet": snippet(found.settings)},
    }
    context.ledger.put("recommendations", {settings.stage: row})
    context.say(f"recommended: {shown(found.settings)}")


def record_parity(context: StageContext, trials: Sequence[Trial]) -> dict[str, Row]:
    """Record the relative difference of trials' losses to fp32; return the rows that there are.

    Compared trials have the same micro-batch, accumulation and workers, which decide what dropout
    draws. A trial without such a partner gets the largest difference of its precision elsewhere.
    """

    def losses(trial: Trial) -> pd.Series[float]:
        steps = results.read_table(context.run_dir, "steps", trial.unit.key)
        return steps.set_index("step")["loss"].astype(float)

    keys = [trial.unit.key for trial in trials]
    rows = {key: row for key in keys if (row := context.ledger.get("trials", key)) is not None}
    done = [t for t in trials if rows.get(t.unit.key, {}).get("status") == "succeeded"]
    exact = {(t.parity, *t.cut): t for t in done if t.precision == "fp32"}
    others = [trial for trial in done if trial.precision != "fp32"]
    largest: dict[tuple[str, str], float] = {}
    for trial in sorted(others, key=lambda t: (t.parity, *t.cut) not in exact):
        kind = trial.parity, trial.precision
        parity = largest.get(kind)
        if (partner := exact.get((trial.parity, *trial.cut))) is not None:
            reference = losses(partner)
            difference = np.linalg.norm(losses(trial) - reference)
            parity = float(difference / np.linalg.norm(reference))
            largest[kind] = max(parity, largest.get(kind, 0.0))
        if parity is not None:
            rows[trial.unit.key] = {**rows[trial.unit.key], "parity": parity}
    context.ledger.put("trials", rows)
    return rows
