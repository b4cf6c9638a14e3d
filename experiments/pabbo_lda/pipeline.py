"""The stages of the main job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from experiments.pabbo_lda.aggregation import aggregate
from experiments.pabbo_lda.curve_training import CurvePolicyTask
from experiments.pabbo_lda.evaluation import EvaluationSettings, measure
from experiments.pabbo_lda.model import ModelSettings, restore_model
from experiments.pabbo_lda.objectives import NAMES, Objective, load_objectives
from experiments.pabbo_lda.optimizers import OptimizerName, Scorer, model_scorer
from experiments.pabbo_lda.optimizers.pabbo_curves import POLICY as CURVE_POLICY
from experiments.pabbo_lda.settings import (
    CurveStageSettings,
    LdaSettings,
    MainSettings,
    PabboStageSettings,
)
from experiments.pabbo_lda.studies import StudySpec, run_studies
from experiments.pabbo_lda.training import ModelTask, PabboTask
from raypipe.errors import ConfigError
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.identity import fingerprint
from raypipe.pipeline.stages import hardware_stage, train_stage
from raypipe.training.weights import read_verified

#: part of every unit's identity; raised when results change
VERSION = 1
#: the same for the tables that are derived from them
AGGREGATION = 2

Size = Literal["small", "large"]


def stages(settings: MainSettings) -> list[Stage]:
    """hardware, train and evaluate both sizes, the studies, their comparison.

    The optimiser ``pabbo_curves`` is trained only where the studies use it.

    Raises:
        ConfigError: a corpus that cannot be used, or a range of T that does not fit it.

    """
    objectives = load_objectives(settings.data, settings.lda)
    train_small = _train_size("small", settings.train_small)
    train_large = _train_size("large", settings.train_large)
    trained: dict[OptimizerName, tuple[Stage, ModelSettings]] = {
        "pabbo_small": (train_small, settings.train_small.pabbo.model),
        "pabbo_large": (train_large, settings.train_large.pabbo.model),
    }
    train_curves = []
    if "pabbo_curves" in settings.lda.optimizers:
        curves = settings.train_curves
        task = CurvePolicyTask(curves.pabbo)
        train_curves = [_train("train_curves", curves, task, "held_out")]
        trained["pabbo_curves"] = (train_curves[0], curves.pabbo.model)
    lda = _lda(settings.lda, objectives, trained)
    earlier = [
        hardware_stage(),
        train_small,
        _evaluate("small", settings.evaluate_small, settings.train_small, train_small),
        train_large,
        _evaluate("large", settings.evaluate_large, settings.train_large, train_large),
        *train_curves,
        lda,
    ]
    return [*earlier, _aggregate(earlier)]


def _train_size(size: Size, settings: PabboStageSettings) -> Stage:
    task = PabboTask(settings.pabbo)  # refuses settings that contradict each other
    return _train(f"train_{size}", settings, task, "evaluation")


def _train(
    name: str,
    settings: PabboStageSettings | CurveStageSettings,
    task: ModelTask,
    measure: str,
) -> Stage:
    """A stage that trains ``task``; its setting ``measure`` does not change the training."""
    if settings.training.steps is None:
        raise ConfigError(f"{name}.training.steps: is missing; PABBO has no epochs")
    recipe = settings.pabbo.model_dump(mode="json", exclude={measure})
    identity = {"version": VERSION, f"{name}.pabbo": recipe}
    return train_stage(name, settings, lambda _: task, identity)


def _evaluate(
    size: Size, settings: EvaluationSettings, trained: PabboStageSettings, train: Stage
) -> Stage:
    name = f"evaluate_{size}"
    unit = Unit(name, {name: settings.model_dump(mode="json"), **_model(train)})
    functions = trained.pabbo.functions
    about = {"trial_id": train.name, "stage": name}

    def run(context: StageContext) -> None:
        weights = read_verified(context.run_dir, context.run_dir.model(train.name))
        model = trained.pabbo.model
        rows = context.call(name, measure, model, weights, settings, functions, on_gpu=True)
        keyed = {f"{name}/{row['method']}/{row['step']}": {**about, **row} for row in rows}
        context.ledger.put("regret", keyed)
        context.finish(unit)

    cost = f"{settings.functions * settings.starts} runs of {settings.steps} duels"
    return Stage(name, run, [unit], (train.name,), cost, on_gpu=True)


def _lda(
    settings: LdaSettings,
    objectives: Sequence[Objective],
    trained: Mapping[OptimizerName, tuple[Stage, ModelSettings]],
) -> Stage:
    used = {name: trained[name] for name in settings.optimizers if name in trained}
    specs = [
        _study(settings, objective, name, run, used[name][0] if name in used else None)
        for objective in objectives
        for run in range(settings.runs)
        for name in settings.optimizers
    ]

    def run(context: StageContext) -> None:
        scorers: dict[str, Scorer] = {
            name: model_scorer(
                restore_model(
                    model, read_verified(context.run_dir, context.run_dir.model(stage.name))
                )
            )
            for name, (stage, model) in used.items()
        }
        run_studies(context, settings, specs, scorers)

    cost = f"{len(specs)} studies, at most {len(specs) * settings.evaluations} LDA trainings"
    needs = ("hardware", *(stage.name for stage, _ in used.values()))
    return Stage("lda", run, [spec.unit for spec in specs], needs, cost)


def _study(
    settings: LdaSettings,
    objective: Objective,
    optimizer: OptimizerName,
    run: int,
    train: Stage | None,
) -> StudySpec:
    decisive = {
        "seed",
        "t_min",
        "t_max",
        "start",
        "iterations",
        "max_iter",
        "batch_size",
        "precision",
    }
    # A range that is not searched leaves the identity of a study as it always was.
    decisive |= {name for name in ("alpha", "eta") if getattr(settings, name) is not None}
    lda = settings.model_dump(mode="json", include=decisive)
    identity = {"version": VERSION, "data": dict(objective.data_identity), "lda": lda}
    identity["objective"] = NAMES[settings.objective]
    if train is not None:
        policy = CURVE_POLICY if optimizer == "pabbo_curves" else settings.policy
        lda["policy"] = policy.model_dump(mode="json")
        identity |= _model(train)
    key = f"lda/{objective.dataset}/{optimizer}/{run}"
    unit = Unit(key, identity, settings.evaluations, "lda.evaluations")
    return StudySpec(unit, objective, optimizer, run, settings.seed + run)


def _aggregate(earlier: Sequence[Stage]) -> Stage:
    done = [
        [unit.key, fingerprint(unit.identity), unit.extent] for s in earlier for unit in s.units
    ]
    unit = Unit("aggregate", {"version": AGGREGATION, "of": fingerprint(done)})

    def run(context: StageContext) -> None:
        for table, rows in aggregate(context.ledger.rows("study_history")).items():
            stale = {key for key, _ in context.ledger.items(table)} - rows.keys()
            context.ledger.remove(table, stale)
            context.ledger.put(table, rows)
        context.finish(unit)

    needs = tuple(stage.name for stage in earlier)
    return Stage("aggregate", run, [unit], needs, "statistics and figures", derived=True)


def _model(train: Stage) -> dict[str, str]:
    """The identity of a trained model: that of its training."""
    return {train.name: fingerprint(train.units[0].identity)}
