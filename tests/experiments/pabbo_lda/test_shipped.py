"""Models that ship: they load, they are what the settings say, and a run can use them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import raypipe as rp
from experiments.pabbo_lda.experiment import EXPERIMENT, untrained_settings
from experiments.pabbo_lda.objective.objectives import TabularObjective
from experiments.pabbo_lda.optimizers import make_optimizer
from experiments.pabbo_lda.optimizers.pabbo import model_scorer
from experiments.pabbo_lda.pabbo.evaluation import EvaluationSettings, search
from experiments.pabbo_lda.pabbo.functions import SyntheticFunctionSettings
from experiments.pabbo_lda.pabbo.model import restore_model, shipped_weights
from experiments.pabbo_lda.settings import START, MainSettings
from experiments.pabbo_lda.space import Point, Space
from experiments.pabbo_lda.study.study import Study
from raypipe.config.yaml_text import load_yaml
from raypipe.graph.experiment import Stage
from raypipe.store.run_directory import RunDirectory

STAGES = ("train_small", "train_large", "train_curves")
MOST_BYTES = 2 * 2**20
CONFIG = """
experiment: experiments.pabbo_lda
data: {options: {max_documents: 120, max_features: 100, min_df: 2}}
train_small: {weights: shipped}
train_large: {weights: shipped}
train_curves: {weights: shipped}
evaluate_small: &evaluation
  {functions: 4, starts: 1, steps: 3, query_points: 32, candidate_pairs: 64}
evaluate_large: *evaluation
lda:
  {runs: 1, t_max: 60, start: [9, 30, 55], evaluations: 5, max_iter: 1, batch_size: 64,
   final_seeds: 0, optimizers: [pabbo_small, pabbo_curves], cache: false}
"""


def run(folder: Path, *overrides: str, **options: object) -> rp.Run:
    return rp.run(load_yaml(CONFIG, "shipped"), overrides, run_dir=folder, local=True, **options)


def stage(name: str, **sections: dict[str, Any]) -> Stage:
    settings = MainSettings.model_validate(sections)
    return next(each for each in EXPERIMENT.stages(settings) if each.name == name)


@pytest.mark.parametrize("name", STAGES)
def test_a_shipped_model_is_that_of_the_default_settings(name):
    weights = shipped_weights(name)
    assert len(weights) <= MOST_BYTES
    settings = getattr(MainSettings(), name)
    assert untrained_settings(name, settings) == []
    assert restore_model(weights).settings == settings.pabbo.model


def test_shipped_models_beat_random_search_on_held_out_functions():
    settings = EvaluationSettings(functions=60, starts=1, steps=20, query_points=128,
                                  candidate_pairs=256, seed=7)  # fmt: skip
    models = {name: shipped_weights(name) for name in ("train_small", "train_large")}
    found = search(models, settings, SyntheticFunctionSettings()).regret
    mean = {name: float(regret.mean()) for name, regret in found.items()}
    assert mean["train_small"] < mean["random"]
    assert mean["train_large"] < mean["random"]


@pytest.mark.slow
def test_the_shipped_curve_policy_is_close_to_the_optimum_after_five_evaluations(data_dir):
    """Within 1 % of the best recorded value: the median over the runs, on each corpus.

    After 82 evaluations the mean of the corpus is within 1 % of the best recorded in its runs.
    """
    objective = TabularObjective.read(data_dir / "lda_published" / "evaluations.csv.gz")
    scorer = model_scorer(restore_model(shipped_weights("train_curves")))
    rows = []
    for dataset, run in objective.runs:
        optimizer = make_optimizer("pabbo_curves", space=Space(2, 1000), seed=run, scorer=scorer)
        study = Study(optimizer, [Point(T) for T in START], 82)
        while not study.done:
            for point in study.request():
                study.supply(point, objective.value(dataset, run, point.T))
        best = objective.best(dataset, run)[1]
        close = [e.evaluation for e in study.history if e.value <= 1.01 * best]
        needed = close[0] - len(START) if close else math.inf
        rows.append((dataset, needed, study.history[-1].best_value, best))
    found = pd.DataFrame(rows, columns=["dataset", "needed", "ours", "recorded"]).groupby("dataset")
    assert len(found) == 4
    assert (found["needed"].median() <= 5).all()
    assert (found["ours"].mean() <= 1.01 * found["recorded"].mean()).all()


def test_a_run_takes_shipped_models_without_a_training(tmp_path, capsys):
    found, stored = run(tmp_path), RunDirectory.at(tmp_path)
    assert "steps" not in {path.stem for path in (tmp_path / "results").glob("*.parquet")}
    for name in STAGES:
        assert stored.read(stored.model(name)) == shipped_weights(name)
    assert set(found.table("regret")["method"]) == {"pabbo", "random"}
    assert set(found.table("studies")["optimizer"]) == {"pabbo_small", "pabbo_curves"}
    capsys.readouterr()
    run(tmp_path)
    assert "nothing to do" in capsys.readouterr().out


def test_a_shipped_model_says_that_it_was_trained_for_other_samples(tmp_path, capsys):
    run(tmp_path, "train_small.pabbo.functions.std=[0.5,1.0]", only=("train_small",))
    said = capsys.readouterr().out
    assert "WARNING: the shipped model was trained with other values of std" in said


def test_a_trained_model_is_measured_beside_the_shipped_one_on_the_same_functions():
    assert set(stage("evaluate_small").units[0].literals) == {"shipped"}
    other = {"pabbo": {"functions": {"std": [0.5, 1.0]}}}
    assert not stage("evaluate_small", train_small=other).units[0].literals
    assert not stage("evaluate_small", train_small={"weights": "shipped"}).units[0].literals


@pytest.mark.parametrize(
    ("lda", "said"),
    [
        ({"objective": "coherence"}, "lda.objective = coherence"),
        ({"t_max": 100, "start": [9, 30]}, "lda.t_max = 100 (curves: 200 to 1000)"),
        ({"start": [9, 9]}, "1 values of lda.start (curves: 2 to 20)"),
        ({}, ""),
    ],
)
def test_pabbo_curves_says_what_its_training_did_not_cover(lda, said):
    found = stage("lda", lda={"optimizers": ["pabbo_curves"], **lda})
    warnings = found.run.keywords["warnings"]
    assert len(warnings) == bool(said)
    assert all(said in warning for warning in warnings)
    without = stage("lda", lda={"optimizers": ["gp_ei"], **lda})
    assert without.run.keywords["warnings"] == []
