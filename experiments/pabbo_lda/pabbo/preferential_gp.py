"""Preferential Gaussian process as a scorer of duels (Chu and Ghahramani, ICML 2005), by BoTorch.

The process has a Matérn 5/2 kernel, a probit likelihood and Laplace's approximation. Its length
scale and its scale maximize the marginal likelihood after some of the duels.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from experiments.pabbo_lda.pabbo.evaluation import Scorer
from experiments.pabbo_lda.pabbo.functions import Candidates

#: numbers of duels after which the hyperparameters are fitted, and steps of L-BFGS of a fit
REFITS, FIT_STEPS = (2, 5, 10, 20), 10
#: draws of the utilities for the expected improvement
DRAWS = 256
_JITTER = 1e-5  # of the largest variance


def preferential_gp_scorer() -> Scorer:
    """Return the noisy expected improvement of a preferential Gaussian process as a scorer.

    It is the expected excess of a duel's better end over the best point so far, which is not known
    for certain: the mean over joint draws of the utilities (Letham et al. 2019).

    The scorer keeps the hyperparameters of each search, so it is for one call of
    :func:`~experiments.pabbo_lda.pabbo.evaluation.simple_regret`.
    """
    kernels: defaultdict[tuple[int, int], Any] = defaultdict(_kernel)

    def score(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
        del used
        functions, starts, _, _ = duels.shape
        scores = torch.empty(functions, starts, candidates.pairs.shape[1], dtype=torch.float64)
        for b in range(functions):
            points, pairs = candidates.points[b].double().cpu(), candidates.pairs[b].cpu()
            for r in range(starts):
                known = duels[b, r].double().cpu()
                mean, covariance = _posterior(
                    known, preferred[b, r].cpu(), points, kernels[b, r], len(known) in REFITS
                )
                scores[b, r] = _improvement(mean, covariance, pairs, torch.isin(points, known))
        return scores.to(duels)

    return score


def _kernel() -> Any:
    """Return a Matérn 5/2 kernel with the priors of BoTorch's ``PairwiseGP``."""
    from gpytorch.constraints import GreaterThan, Interval
    from gpytorch.kernels import MaternKernel, ScaleKernel
    from gpytorch.priors import GammaPrior, SmoothedBoxPrior

    shape, rate, low, high = 2.4, 2.7, 1e-2, 1e2
    mode = (shape - 1) / rate
    kernel = MaternKernel(
        ard_num_dims=1,
        lengthscale_prior=GammaPrior(shape, rate),
        lengthscale_constraint=GreaterThan(1e-4, transform=None, initial_value=mode),
    )
    scale = Interval(low / 2, 2 * high, initial_value=1.0)
    scaled = ScaleKernel(
        kernel, outputscale_prior=SmoothedBoxPrior(low, high), outputscale_constraint=scale
    )
    return scaled.double()


def _posterior(
    duels: Tensor, preferred: Tensor, points: Tensor, kernel: Any, fit: bool
) -> tuple[Tensor, Tensor]:
    """Return mean ``[N]`` and covariance ``[N, N]`` of the utility at points ``[N]``.

    Args:
        duels: ``[C, 2]`` in [-1, 1].
        preferred: ``[C]`` 0 or 1.
        points: ``[N]`` in [-1, 1].
        kernel: a kernel, whose hyperparameters a fit changes.
        fit: whether to fit them.

    """
    from botorch.models.pairwise_gp import PairwiseGP, PairwiseLaplaceMarginalLogLikelihood
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    ends = torch.arange(duels.numel()).view_as(duels)
    winner_first: Tensor = torch.where(preferred[:, None].bool(), ends.flip(1), ends)
    places = _in_unit_interval(duels.flatten())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fits that end early, and jitter on the diagonal
        with torch.enable_grad():
            model = PairwiseGP(places, winner_first, covar_module=kernel)
            if fit:
                objective = PairwiseLaplaceMarginalLogLikelihood(model.likelihood, model)
                fit_gpytorch_mll_scipy(objective, options={"maxiter": FIT_STEPS})
                model.set_train_data(places, winner_first, update_model=True)
        model.eval()
        with torch.no_grad():
            found: Any = model.posterior(_in_unit_interval(points))
            return found.mvn.mean, found.mvn.covariance_matrix


def _in_unit_interval(points: Tensor) -> Tensor:
    """Return points ``[n]`` of [-1, 1] as ``[n, 1]`` in [0, 1], for which the priors are made."""
    return (points[:, None] + 1) / 2


def _improvement(mean: Tensor, covariance: Tensor, pairs: Tensor, known: Tensor) -> Tensor:
    """Return the expected excess ``[P]`` of pairs ``[P, 2]`` over the best of the known points.

    The draws are the same for each search.
    """
    n = len(mean)
    noise = torch.randn(DRAWS, n, dtype=mean.dtype, generator=torch.Generator().manual_seed(0))
    jitter = _JITTER * covariance.diagonal().max() * torch.eye(n, dtype=mean.dtype)
    utility = mean + noise @ torch.linalg.cholesky(covariance + jitter).T
    best = utility[:, known].amax(1, keepdim=True)
    gain: Tensor = (utility[:, pairs].amax(2) - best).relu().mean(0)
    return gain
