from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from experiments.pabbo_lda import experiment
from experiments.pabbo_lda.experiment import stages
from experiments.pabbo_lda.pabbo import preferential_gp
from experiments.pabbo_lda.pabbo.evaluation import (
    EvaluationSettings,
    held_out_functions,
    random_scorer,
    search,
    simple_regret,
)
from experiments.pabbo_lda.pabbo.functions import SyntheticFunctionSettings
from experiments.pabbo_lda.pabbo.model import SMALL, PabboModel
from experiments.pabbo_lda.pabbo.preferential_gp import Acquisition, preferential_gp_scorer
from experiments.pabbo_lda.settings import MainSettings
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import read_verified, write_weights

SETTINGS = EvaluationSettings(
    functions=4, starts=2, steps=6, query_points=30, candidate_pairs=60, preferential_gp=True
)
FUNCTIONS = SyntheticFunctionSettings()
needs_botorch = pytest.mark.skipif(find_spec("botorch") is None, reason="BoTorch is missing")


def _regret(acquisition: Acquisition) -> Tensor:
    held_out = held_out_functions(SETTINGS, FUNCTIONS)
    return simple_regret(preferential_gp_scorer(acquisition), held_out, SETTINGS)


@needs_botorch
def test_the_process_is_ahead_of_random_search_on_smooth_functions() -> None:
    smooth = SyntheticFunctionSettings(length_scale=(1.0, 2.0), sharp_probability=0)
    settings = SETTINGS.model_copy(update={"functions": 12, "starts": 1})
    held_out = held_out_functions(settings, smooth)
    ours = simple_regret(preferential_gp_scorer(), held_out, settings)
    random = simple_regret(random_scorer(0, held_out), held_out, settings)
    assert ours[..., 1:].mean() < random[..., 1:].mean()


def test_the_acquisitions_equal_means_of_draws(monkeypatch) -> None:
    monkeypatch.setattr(preferential_gp, "DRAWS", 400_000)
    mean = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    root = torch.tensor([[1.0, 0, 0], [0.5, 0.8, 0], [0.0, 0.3, 0.4]], dtype=torch.float64)
    pairs = torch.tensor([[0, 1], [1, 2], [2, 0]])
    noise = torch.randn(400_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    utility = mean + noise @ root.T
    covariance = root @ root.T
    ends = utility[:, pairs].amax(2)
    best_option = preferential_gp._best_option(mean, covariance, pairs)
    torch.testing.assert_close(best_option, ends.mean(0), atol=0.01, rtol=0)
    known = torch.tensor([True, False, False])
    improvement = preferential_gp._improvement(mean, covariance, pairs, known)
    expected = (ends - utility[:, :1]).relu().mean(0)
    torch.testing.assert_close(improvement, expected, atol=0.01, rtol=0)


@needs_botorch
def test_an_evaluation_can_compare_with_the_process(tmp_path) -> None:
    torch.manual_seed(0)
    run, metadata = RunDirectory.at(tmp_path), {"model": SMALL.model_dump_json()}
    write_weights(run, run.model("m"), PabboModel(SMALL).state_dict(), metadata)
    weights = read_verified(run, run.model("m"))
    drawn = SETTINGS.model_copy(update={"sampled": True})
    searches = search({"pabbo": weights}, drawn, FUNCTIONS)
    assert list(searches.regret) == ["pabbo", "random", "preferential_gp"]
    assert torch.equal(searches.regret["preferential_gp"], _regret("improvement"))


def test_a_missing_library_is_refused_with_its_extra(monkeypatch) -> None:
    monkeypatch.setattr(experiment, "find_spec", lambda name: None)
    settings = MainSettings(evaluate_large=EvaluationSettings(preferential_gp=True))
    with pytest.raises(ConfigError, match=r"evaluate_large.preferential_gp: .*\[duels\]"):
        stages(settings)
