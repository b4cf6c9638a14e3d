"""Find the optimizer that needs the fewest LDA trainings for the best number of topics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

from experiments.pabbo_lda.objective.objectives import load_objectives
from experiments.pabbo_lda.optimizers import OptimizerName, release
from experiments.pabbo_lda.optimizers.pabbo import PairScorer, model_scorer
from experiments.pabbo_lda.pabbo.curve_training import CurvePolicyTask
from experiments.pabbo_lda.pabbo.evaluation import (
    EvaluationSettings,
    Searches,
    measure_rows,
    regret_rows,
    search,
)
from experiments.pabbo_lda.pabbo.functions import SyntheticFunctionSettings
from experiments.pabbo_lda.pabbo.model import PabboModelSettings, restore_model, shipped_weights
from experiments.pabbo_lda.pabbo.training import PabboTask, PreferenceTask
from experiments.pabbo_lda.report_sections import larger_study, sections
from experiments.pabbo_lda.settings import CurveStageSettings, MainSettings, PabboStageSettings
from experiments.pabbo_lda.study.comparison import aggregate
from experiments.pabbo_lda.study.runner import forget_studies, run_studies, study_specs
from experiments.pabbo_lda.tables import STEP_METRICS, TABLES
from raypipe import (
    Cache,
    ConfigError,
    Experiment,
    PoolOptions,
    RunDirectory,
    Stage,
    StageContext,
    Unit,
    hardware_stage,
    train_stage,
    weights,
)

#: held-out functions of a task on CPUs
_PART = 25
#: stages whose model an optimizer uses
TRAINED_BY: dict[OptimizerName, str] = {
    "pabbo_small": "train_small",
    "pabbo_large": "train_large",
    "pabbo_curves": "train_curves",
}


def stages(settings: MainSettings) -> list[Stage]:
    """Return the stages; ``train_curves`` only if the studies use ``pabbo_curves``.

    Raises:
        ConfigError: a corpus that cannot be used, or a range of T that does not fit it.

    """
    s = settings
    earlier = [
        hardware_stage(),
        _training_stage("train_small", s.train_small, PabboTask),
        _evaluation_stage("small", s.evaluate_small, s.train_small),
        _training_stage("train_large", s.train_large, PabboTask),
        _evaluation_stage("large", s.evaluate_large, s.train_large),
    ]
    if "pabbo_curves" in s.lda.optimizers:
        earlier.append(_training_stage("train_curves", s.train_curves, CurvePolicyTask))
    last = Stage(
        "aggregate",
        run_aggregate,
        needs=("lda",),  # all that it reads
        reads=(),
        workload="statistics and figures",
        always_rerun=True,
    )
    return [*earlier, _lda_stage(s), last]


def _training_stage(
    name: str, settings: PabboStageSettings | CurveStageSettings, kind: type[PreferenceTask]
) -> Stage:
    """Return the training of a model, or the stage that takes the one that ships."""
    if settings.weights == "shipped":
        content = shipped_weights(name)
        size = PabboModelSettings.model_validate_json(weights.metadata_of(content)["model"])
        if size != settings.pabbo.model:
            sizes = ", ".join(f"{key}: {value}" for key, value in size.model_dump().items())
            raise ConfigError(
                f"{name}.weights = shipped: the shipped model has another size than "
                f"{name}.pabbo.model; set it to {{{sizes}}}, or leave {name}.weights out"
            )
        return Stage(
            name,
            partial(run_shipped, untrained=untrained_settings(name, settings)),
            [Unit(name, {"weights": sha256(content).hexdigest()})],
            reads=(),
            workload="the model that ships, no training",
        )
    return train_stage(name, settings, partial(_build_task, kind, name), reads=(name,))


def untrained_settings(name: str, settings: PabboStageSettings | CurveStageSettings) -> list[str]:
    """Return the keys of the samples' distribution for which the shipped model was not trained."""
    known = json.loads(weights.metadata_of(shipped_weights(name))["trained_on"])
    wanted = settings.pabbo.distribution.model_dump(mode="json")
    return [key for key in wanted if wanted[key] != known.get(key)]


def run_shipped(context: StageContext, untrained: Sequence[str]) -> None:
    """Take the shipped model; ``untrained`` are keys whose values its training did not have."""
    name = context.stage.name
    context.run_dir.write(context.run_dir.model(name), shipped_weights(name))
    if untrained:
        context.say(
            f"WARNING: the shipped model was trained with other values of {', '.join(untrained)}; "
            f"train it here if these matter: {name}.weights=trained"
        )


def _build_task(
    kind: type[PreferenceTask], name: str, settings: Any, run_dir: RunDirectory | None
) -> PreferenceTask:
    del run_dir  # the samples are drawn
    return kind(getattr(settings, name).pabbo)


def _evaluation_stage(
    size: str, settings: EvaluationSettings, trained: PabboStageSettings
) -> Stage:
    name, train = f"evaluate_{size}", f"train_{size}"
    searches = settings.functions * settings.starts
    if settings.preferential_gp and find_spec("botorch") is None:
        raise ConfigError(
            f"{name}.preferential_gp: needs BoTorch: pip install 'raypipe-runner[duels]'"
        )
    # the shipped model is measured too, unless the run uses it or trains for other functions
    shipped = trained.weights == "trained" and not untrained_settings(train, trained)
    literals = {"shipped": sha256(shipped_weights(train)).hexdigest()} if shipped else {}
    return Stage(
        name,
        run_evaluation,
        [Unit(name, literals)],
        needs=(train,),
        reads=(name, f"{train}.pabbo.functions"),
        workload=f"{searches} runs of {settings.steps} duels",
        on_gpu=True,
    )


def run_evaluation(context: StageContext) -> None:
    """Evaluate the model of the needed training on held-out functions."""
    name, (train,) = context.stage.name, context.stage.needs
    (unit,) = context.stage.units
    settings = getattr(context.settings, name)
    functions = getattr(context.settings, train).pabbo.functions
    models = {"pabbo": weights.read_verified(context.run_dir, context.run_dir.model(train))}
    if "shipped" in unit.literals:
        models["shipped"] = shipped_weights(train)
    searches = _searches(context, models, settings, functions)
    about = {"trial_id": context.run_dir.trial_id(train), "stage": name}
    curves, measures = regret_rows(searches.regret), measure_rows(searches, control="pabbo")
    context.finish(
        name,
        {
            "regret": {f"{name}/{row['method']}/{row['step']}": about | row for row in curves},
            "measures": {f"{name}/{row['method']}/{row['start']}": about | row for row in measures},
        },
    )


def _searches(
    context: StageContext,
    models: Mapping[str, bytes],
    settings: EvaluationSettings,
    functions: SyntheticFunctionSettings,
) -> Searches:
    """Return all searches: of one task on a GPU, and of a task for each part on CPUs."""
    name, arguments = context.stage.name, (search, models, settings, functions)
    if any(node.gpus for node in context.session.nodes):
        found: Searches = context.call(name, *arguments, on_gpu=True)
        return found
    firsts = range(0, settings.functions, _PART)
    parts = [range(first, min(first + _PART, settings.functions)) for first in firsts]
    with context.pool(PoolOptions()) as pool:
        calls = ((f"{name} {part.start}", *arguments, part) for part in parts)
        return Searches.of([found for _, found in context.map(pool, calls)])


def _lda_stage(settings: MainSettings) -> Stage:
    """Return the studies; one of an optimizer without a model does not need any training."""
    lda = settings.lda
    objectives = load_objectives(settings.data, lda)
    specs = study_specs(lda, objectives)
    most = len(specs) * (lda.evaluations * lda.seeds + lda.unseen_seeds)
    trainings = [TRAINED_BY[name] for name in lda.optimizers if name in TRAINED_BY]
    return Stage(
        "lda",
        partial(run_lda, warnings=_beyond_training(settings)),
        [spec.unit(lda, TRAINED_BY.get(spec.optimizer)) for spec in specs],
        needs=("hardware", *trainings),
        reads=("data", "lda"),
        workload=f"{len(specs)} studies, at most {most} LDA trainings",
        forget=forget_studies,
    )


def _beyond_training(settings: MainSettings) -> list[str]:
    """Return how the studies ask `pabbo_curves` for what its training curves do not cover."""
    lda, curves = settings.lda, settings.train_curves.pabbo.curves
    if "pabbo_curves" not in lda.optimizers:
        return []
    (low, high), (few, many) = curves.t_max, curves.start
    known = len(set(lda.start))
    beyond = {
        f"lda.objective = {lda.objective}": lda.objective == "coherence",
        f"lda.t_max = {lda.t_max} (curves: {low} to {high})": not low <= lda.t_max <= high,
        f"{known} values of lda.start (curves: {few} to {many})": not few <= known <= many,
    }
    return [
        f"WARNING: pabbo_curves was not trained for {what}; gp_ei and pfn_ei need no such training"
        for what, holds in beyond.items()
        if holds
    ]


def run_lda(context: StageContext, warnings: Sequence[str] = ()) -> None:
    """Run the studies that are not finished, after the warnings."""
    data, lda = context.settings.data, context.settings.lda
    objectives = load_objectives(data, lda)
    for note in (*warnings, *(note for each in objectives for note in each.notes())):
        context.say(note)
    sizes = {each.dataset: each.size for each in objectives}
    context.ledger.put("corpora", {name: size for name, size in sizes.items() if size})

    @cache
    def scorer(name: OptimizerName) -> PairScorer | None:
        if (train := TRAINED_BY.get(name)) is None:
            return None
        content = weights.read_verified(context.run_dir, context.run_dir.model(train))
        return model_scorer(restore_model(content))

    # values of another version of this experiment or of scikit-learn are not shared
    kind = f"evaluations-{EXPERIMENT.version}-scikit-learn-{release('scikit-learn')}"
    with Cache(kind, enabled=lda.cache) as values:
        run_studies(context, lda, study_specs(lda, objectives), scorer, values)


def run_aggregate(context: StageContext) -> None:
    """Derive the tables of comparisons from all finished studies."""
    found = map(context.ledger.rows, ("study_history", "evaluations", "studies"))
    tables = aggregate(*found)
    for table, rows in tables.items():
        stale = {key for key, _ in context.ledger.items(table)} - rows.keys()
        context.ledger.remove(table, stale)
        context.ledger.put(table, rows)
    for text in larger_study(tables["convergence"].values()):
        context.say(text)


EXPERIMENT = Experiment(
    "pabbo_lda",
    version=1,
    settings=MainSettings,
    stages=stages,
    report=sections,
    tables=TABLES,
    step_metrics=STEP_METRICS,
)
