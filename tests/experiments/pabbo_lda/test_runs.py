"""Runs with models that ship, and on bags of words and documents of the user's own.

Tables: ``runs.yaml``.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pandas as pd
import pytest

from experiments.pabbo_lda import settings
from experiments.pabbo_lda.experiment import EXPERIMENT, untrained_settings
from experiments.pabbo_lda.objective.objectives import TabularObjective
from experiments.pabbo_lda.optimizers import make_optimizer
from experiments.pabbo_lda.optimizers.pabbo import model_scorer
from experiments.pabbo_lda.pabbo.evaluation import EvaluationSettings, search
from experiments.pabbo_lda.pabbo.functions import SyntheticFunctionSettings
from experiments.pabbo_lda.pabbo.model import restore_model, shipped_weights
from experiments.pabbo_lda.settings import START, MainSettings
from experiments.pabbo_lda.space import Space
from experiments.pabbo_lda.study.study import Study
from raypipe.graph.experiment import Stage
from raypipe.store.run_directory import RunDirectory
from tests.command import table
from tests.experiments.pabbo_lda.test_optimizers import finish, points
from tests.experiments.runs import resolved, run, small
from tests.scenario import cases

pytestmark = pytest.mark.usefixtures("here")
CASES = cases(__file__, "runs")
STAGES = ("train_small", "train_large", "train_curves")


def stage(name: str, **sections: dict[str, Any]) -> Stage:
    settings = MainSettings.model_validate(sections)
    return next(each for each in EXPERIMENT.stages(settings) if each.name == name)


@pytest.mark.parametrize("name", STAGES)
def test_a_shipped_model_is_that_of_the_default_settings(name):
    settings = getattr(MainSettings(), name)
    assert untrained_settings(name, settings) == []
    assert restore_model(shipped_weights(name)).settings == settings.pabbo.model


def test_shipped_models_beat_random_search_on_held_out_functions():
    settings = EvaluationSettings(functions=30, starts=1, steps=20, query_points=128,
                                  candidate_pairs=256, seed=7)  # fmt: skip
    models = {name: shipped_weights(name) for name in ("train_small", "train_large")}
    found = search(models, settings, SyntheticFunctionSettings()).regret
    mean = {name: float(regret.mean()) for name, regret in found.items()}
    assert max(mean["train_small"], mean["train_large"]) < mean["random"]


@pytest.mark.slow
def test_the_shipped_curve_policy_is_close_to_the_optimum_after_five_evaluations(data_dir):
    """Within 1 % of the best recorded value: the median over the runs, on each corpus.

    After 82 evaluations the mean of the corpus is within 1 % of the best recorded in its runs.
    """
    objective = TabularObjective.read(data_dir / "lda_published" / "evaluations.csv.gz")
    scorer = model_scorer(restore_model(shipped_weights("train_curves")))
    rows = []
    for at in objective.runs:
        optimizer = make_optimizer("pabbo_curves", space=Space(2, 1000), seed=at[1], scorer=scorer)
        study = Study(optimizer, points(*START), 82)
        finish(study, lambda point, at=at: objective.value(*at, point.T))
        best = objective.best(*at)[1]
        close = [e.evaluation for e in study.history if e.value <= 1.01 * best]
        needed = close[0] - len(START) if close else math.inf
        rows.append((at[0], needed, study.history[-1].best_value, best))
    found = pd.DataFrame(rows, columns=["dataset", "needed", "ours", "recorded"]).groupby("dataset")
    assert len(found) == 4
    assert (found["needed"].median() <= 5).all()
    assert (found["ours"].mean() <= 1.01 * found["recorded"].mean()).all()


def test_a_model_of_other_functions_is_not_measured_beside_the_shipped_one():
    other = {"pabbo": {"functions": {"std": [0.5, 1.0]}}}
    assert not stage("evaluate_small", train_small=other).units[0].literals


@pytest.mark.parametrize(("lda", "said"), CASES["beyond_training"])
def test_pabbo_curves_says_what_its_training_did_not_cover(lda, said):
    found = stage("lda", lda={"optimizers": ["pabbo_curves"], **lda})
    warnings = found.run.keywords["warnings"]
    assert len(warnings) == bool(said)
    assert all(said in warning for warning in warnings)
    without = stage("lda", lda={"optimizers": ["gp_ei"], **lda})
    assert without.run.keywords["warnings"] == []


def test_the_quickstart_runs_on_own_files_with_shipped_models(files, tmp_path, caplog, capsys):
    settings._warn.cache_clear()
    assert run("quickstart", tmp_path, *small("quickstart", files), profile="auto") == 0
    found = table(tmp_path, "evaluations")
    assert set(found["dataset"]) == {"mine"}
    assert found["value"].between(1, 3000).all()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["data.options: max_documents, max_features: left out, since data.source = bow"]
    said = capsys.readouterr().out
    assert "WARNING: the shipped model was trained with other values of std" in said
    assert "steps" not in {path.stem for path in (tmp_path / "results").glob("*.parquet")}
    stored = RunDirectory.at(tmp_path)
    for name in STAGES:
        assert stored.read(stored.model(name)) == shipped_weights(name)
    assert set(table(tmp_path, "regret")["method"]) == {"pabbo", "random"}
    assert set(table(tmp_path, "studies")["optimizer"]) == {"pabbo_small", "pabbo_curves"}


@pytest.mark.parametrize(("words", "options"), CASES["options"])
def test_options_belong_to_the_source_that_was_chosen(words, options):
    assert resolved("quickstart", *words).settings.data.options == options


def test_a_coherence_is_no_perplexity_and_documents_that_are_left_out_are_counted(
    files, tmp_path, capsys
):
    words = small("pabbo_lda", files, "lda.objective=coherence")
    assert run("pabbo_lda", tmp_path, *words, only=("lda", "aggregate")) == 0
    corpora = table(tmp_path, "corpora")[["documents", "dropped_documents", "words"]]
    assert corpora.values.tolist() == [[4, 3, 6]]
    studies, history = table(tmp_path, "studies"), table(tmp_path, "study_history")
    assert studies["best_perplexity"].isna().all()
    lowest = history.groupby("optimizer")["value"].min()
    assert dict(zip(studies["optimizer"], -studies["best_coherence"], strict=True)) == dict(lowest)
    shown = capsys.readouterr().out
    assert "documents 4, words 6" in shown
    assert "WARNING: corpus mixed: 3 of 7 documents have no word of the vocabulary" in shown
    assert "best_coherence" in shown
    assert "best_perplexity" not in shown
    # and the comparison of studies needs nothing but the studies
    assert set(table(tmp_path, "stages")["stage"]) == {"hardware", "lda", "aggregate"}
