from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.pabbo_lda.pabbo.duels import Candidates, winners
from experiments.pabbo_lda.pabbo.evaluation import (
    evaluate_model,
    policy_scorer,
    random_scorer,
    regret_curve,
    regret_rows,
    simple_regret,
)
from experiments.pabbo_lda.pabbo.held_out_functions import (
    EvaluationSettings,
    HeldOut,
    held_out_functions,
    published_functions,
)
from experiments.pabbo_lda.pabbo.model import SMALL, PabboModel, score_pairs
from experiments.pabbo_lda.pabbo.searches import Searches, search
from experiments.pabbo_lda.pabbo.synthetic_functions import (
    SyntheticFunctionSettings,
    sample_functions,
)
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import read_verified, write_weights

SETTINGS = EvaluationSettings(functions=6, starts=3, steps=8, query_points=20, candidate_pairs=40)
FUNCTIONS = SyntheticFunctionSettings()


def _held_out() -> HeldOut:
    return held_out_functions(SETTINGS, FUNCTIONS)


def _oracle(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
    del preferred, used
    return candidates.utility.amax(2)[:, None].expand(-1, duels.shape[1], -1)


def test_an_oracle_finds_the_best_candidate_at_once() -> None:
    held_out = _held_out()
    regret = simple_regret(_oracle, held_out, SETTINGS)
    assert regret.shape == (6, 3, 9)
    gap = held_out.best_utility - held_out.candidates.utility.amax((1, 2))
    torch.testing.assert_close(regret[:, :, 1], gap[:, None].expand(-1, 3))


def test_regret_starts_with_the_first_duel_and_never_grows() -> None:
    held_out = _held_out()
    regret = simple_regret(random_scorer(0, held_out), held_out, SETTINGS)
    first = held_out.best_utility[:, None] - held_out.utility.amax((2, 3))
    torch.testing.assert_close(regret[:, :, 0], first)
    assert (regret.diff(dim=2) <= 0).all()
    assert (regret >= -1e-5).all()


def test_no_candidate_is_asked_twice() -> None:
    settings = SETTINGS.model_copy(update={"steps": 40})
    held_out = held_out_functions(settings, FUNCTIONS)
    regret = simple_regret(random_scorer(0, held_out), held_out, settings)
    gap = held_out.best_utility - held_out.candidates.utility.amax((1, 2))
    torch.testing.assert_close(regret[:, :, -1], gap[:, None].expand(-1, 3))


def test_random_search_differs_by_start_and_step_and_repeats_by_seed() -> None:
    held_out = _held_out()
    one, again, other = (
        simple_regret(random_scorer(seed, held_out), held_out, SETTINGS) for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    candidates = held_out.candidates
    scorer = random_scorer(0, held_out)
    short, long = (scorer(torch.zeros(6, 3, n, 2), torch.zeros(6, 3, n), candidates, 0.1)
                   for n in (1, 2))  # fmt: skip
    assert not torch.equal(short, long)
    assert not torch.equal(short[:, 0], short[:, 1])


@pytest.mark.parametrize("sampled", [False, True])
def test_the_parts_of_an_evaluation_are_the_whole(tmp_path: Path, sampled: bool) -> None:
    settings = SETTINGS.model_copy(update={"sampled": sampled})
    torch.manual_seed(0)
    run, metadata = RunDirectory.at(tmp_path), {"model": SMALL.model_dump_json()}
    write_weights(run, run.model("m"), PabboModel(SMALL).state_dict(), metadata)
    models = {"pabbo": read_verified(run, run.model("m"))}
    whole = search(models, settings, FUNCTIONS, range(6))
    ranges = (range(1), range(1, 4), range(4, 6))
    parts = Searches.of([search(models, settings, FUNCTIONS, part) for part in ranges])
    assert torch.equal(parts.regret["random"], whole.regret["random"])
    torch.testing.assert_close(parts.regret["pabbo"], whole.regret["pabbo"])
    assert torch.equal(parts.far, whole.far)
    torch.testing.assert_close(parts.spread, whole.spread)
    assert regret_rows(whole.regret)[0] == pytest.approx(regret_rows(parts.regret)[0])


def test_held_out_functions_are_not_training_functions() -> None:
    trained = sample_functions(SETTINGS.seed, torch.arange(6), 20, FUNCTIONS)
    assert not torch.allclose(trained.points, _held_out().candidates.points)


def test_all_runs_together_are_each_run_alone() -> None:
    torch.manual_seed(0)
    model = PabboModel(SMALL).eval()
    held_out = _held_out()
    together = simple_regret(policy_scorer(model), held_out, SETTINGS)
    c, b, r = held_out.candidates, 4, 2
    duels, utility = held_out.duels[b, r], held_out.utility[b, r]
    asked = torch.zeros(40, dtype=torch.bool)
    best = [utility.max()]
    for step in range(SETTINGS.steps):
        used = (step + 1) / SETTINGS.steps
        scores = score_pairs(model, duels, winners(utility), c.points[b], c.pairs[b], used)
        choice = scores.masked_fill(asked, -torch.inf).argmax()
        asked[choice] = True
        duels = torch.cat((duels, c.duels[b, choice][None]))
        utility = torch.cat((utility, c.utility[b, choice][None]))
        best.append(utility.max())
    torch.testing.assert_close(together[b, r], held_out.best_utility[b] - torch.stack(best))


def test_sampling_explores_where_the_best_score_does_not() -> None:
    def flat(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
        return torch.zeros(*duels.shape[:2], candidates.preferred.shape[1])

    held_out = _held_out()
    greedy = simple_regret(flat, held_out, SETTINGS)
    sampled = simple_regret(flat, held_out, SETTINGS.model_copy(update={"sampled": True}))
    assert not torch.equal(greedy, sampled)


def test_curve_and_band_are_over_functions() -> None:
    regret = torch.rand(50, 4, 3, dtype=torch.float64)
    curve = regret_curve(regret)
    means = regret.mean(1).numpy()
    half = 1.96 * means.std(0, ddof=1) / np.sqrt(50)
    np.testing.assert_allclose(curve.mean, means.mean(0))
    np.testing.assert_allclose(curve.high - curve.mean, half)
    np.testing.assert_allclose(curve.mean - curve.low, half)
    assert curve.step.tolist() == [0, 1, 2]


def test_one_function_has_no_band() -> None:
    curve = regret_curve(torch.rand(1, 4, 3))
    assert np.isfinite(curve.low).all()


def test_the_measures_name_ours_and_random_search() -> None:
    measures = evaluate_model(PabboModel(SMALL), SETTINGS, FUNCTIONS, "cpu")
    assert set(measures) == {
        "simple_regret", "simple_regret_all_steps",
        "random_simple_regret", "random_simple_regret_all_steps",
    }  # fmt: skip
    assert measures["simple_regret"] <= measures["simple_regret_all_steps"]


def test_the_published_functions(data_dir: Path) -> None:
    path = data_dir / "bbo" / "gp1d_tasks.npz"
    if not path.is_file():
        pytest.skip("bbo/gp1d_tasks.npz is not in the data folder")
    held_out = published_functions(path, SETTINGS.model_copy(update={"candidate_pairs": 10_000}))
    assert held_out.candidates.pairs.shape == (30, 4950, 2)
    assert held_out.duels.shape == (30, 30, 1, 2)
    assert (held_out.candidates.utility <= held_out.best_utility[:, None, None] + 1e-4).all()
    with np.load(path) as stored:
        published = torch.from_numpy(stored["initial_c"]).T
    assert torch.equal(winners(held_out.utility)[:, :, 0], published.long())
    regret = simple_regret(random_scorer(0, held_out), held_out, SETTINGS)
    assert regret.shape == (30, 30, 9)
    assert regret.isfinite().all()
