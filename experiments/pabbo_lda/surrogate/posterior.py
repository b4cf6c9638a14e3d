"""Posterior and expected improvement of an expensive function, from weights that ship."""

from __future__ import annotations

import hashlib
from importlib import resources

import numpy as np
import torch
from numpy.typing import ArrayLike

from experiments.pabbo_lda.space import FloatArray
from experiments.pabbo_lda.surrogate.model import (
    DIMENSIONS,
    LARGEST,
    Mixture,
    SurrogateModel,
    ValueScale,
    restore_surrogate,
)

#: the weights that ship
WEIGHTS = "weights.safetensors"
#: nodes per component for moments of values
_NODES = 9


class Surrogate:
    """Prediction of a function of one to three variables from its evaluated points.

    Positions lie in [-1, 1]; put a variable that acts by factors on its logarithm first. Smaller
    values are better. The unit of the values does not matter. The results are deterministic, do not
    depend on the order of the points, and a candidate's does not depend on the others.
    """

    def __init__(self, model: SurrogateModel) -> None:
        self._model = model

    def expected_improvement(
        self, known: ArrayLike, values: ArrayLike, candidates: ArrayLike
    ) -> FloatArray:
        """Return the expected improvement [m] on the best value, at least 0.

        Improvements count in the unit of the values while they are small next to the spread of the
        best values; large ones count less than in proportion.

        Args:
            known: evaluated points [n, d] in [-1, 1], with 1 <= d <= 3 and n >= 1.
            values: their values [n].
            candidates: points [m, d] in [-1, 1].

        Raises:
            ValueError: a shape, a position or a value that is not allowed.

        """
        posterior, scale = self._posterior(known, values, candidates)
        gain: FloatArray = (posterior.below_zero().mean(0) * scale.unit[0]).numpy()
        return gain

    def predict(
        self, known: ArrayLike, values: ArrayLike, candidates: ArrayLike
    ) -> tuple[FloatArray, FloatArray]:
        """Return the mean [m] and the standard deviation [m] of the values at candidates.

        Values beyond the worst known one by more than the spread of all known ones count as that.
        Parameters and errors are those of :meth:`expected_improvement`.
        """
        posterior, scale = self._posterior(known, values, candidates)
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        scaled = posterior.mean[..., None] + posterior.deviation[..., None] * torch.as_tensor(nodes)
        worst = torch.as_tensor(min(np.max(values), LARGEST), dtype=torch.float64).expand(1, 1)
        limit = (2 * (worst - scale.best)).clamp(min=1e-300) / scale.unit
        limit = limit.log1p().log1p()[..., None, None]
        drawn = scale.inverse(scaled.double().clamp(-limit, limit).flatten(1)).view_as(scaled)
        weight = posterior.log_weight.double().exp()[..., None] * torch.as_tensor(
            weights / weights.sum()
        )
        mean = (weight * drawn).sum((2, 3)).mean(0)
        variance = (weight * (drawn - mean[:, None, None]).square()).sum((2, 3)).mean(0)
        return mean.numpy(), variance.sqrt().numpy()

    def _posterior(
        self, known: ArrayLike, values: ArrayLike, candidates: ArrayLike
    ) -> tuple[Mixture, ValueScale]:
        """Return the distributions [2, m] at the candidates and at their reflection, to average.

        A reflected function is as likely as the function, which the network knows only nearly.
        """
        points, losses, queries = _checked(known, values, candidates)
        d = points.shape[1]
        used = torch.zeros(2, DIMENSIONS)
        used[:, :d] = 1

        def padded(array: FloatArray) -> torch.Tensor:
            wide = np.pad(array, ((0, 0), (0, DIMENSIONS - d)))
            place = torch.as_tensor(wide, dtype=torch.float32)
            return torch.stack((place, -place))

        observed = torch.as_tensor(losses)[None]
        scale = ValueScale(observed)
        with torch.no_grad():
            posterior = self._model(
                padded(points), scale.forward(observed).float().expand(2, -1), padded(queries), used
            )
        return posterior, scale


def load() -> Surrogate:
    """Return the surrogate with the weights that ship, on the CPU.

    Raises:
        ValueError: the file of the weights is damaged.

    """
    return Surrogate(restore_surrogate(_weights()))


def weights_sha256() -> str:
    """Return the SHA-256 hash of the weights that ship: others give other results."""
    return hashlib.sha256(_weights()).hexdigest()


def _weights() -> bytes:
    return resources.files(__package__).joinpath(WEIGHTS).read_bytes()


def _checked(
    known: ArrayLike, values: ArrayLike, candidates: ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the arrays as float64. Raises ValueError."""
    points, queries = (np.asarray(array, dtype=np.float64) for array in (known, candidates))
    losses = np.asarray(values, dtype=np.float64)
    if points.ndim != 2 or len(points) < 1:
        raise ValueError(f"known has the shape {points.shape}; it must be [n, d] with n >= 1")
    if not 1 <= points.shape[1] <= 3:
        raise ValueError(
            f"points have {points.shape[1]} dimensions; the surrogate was trained on 1 to 3"
        )
    if losses.shape != (len(points),):
        raise ValueError(f"values has the shape {losses.shape}; it must be [{len(points)}]")
    if queries.ndim != 2 or queries.shape[1] != points.shape[1]:
        raise ValueError(
            f"candidates has the shape {queries.shape}; it must be [m, {points.shape[1]}]"
        )
    for name, array in (("known", points), ("candidates", queries)):
        if not (np.abs(array) <= 1 + 1e-9).all():  # also not a number
            raise ValueError(f"{name} has positions outside [-1, 1]; scale them to [-1, 1]")
    if not np.isfinite(losses).all():
        raise ValueError("values are not finite; replace failed evaluations by a large value")
    return points, losses, queries
