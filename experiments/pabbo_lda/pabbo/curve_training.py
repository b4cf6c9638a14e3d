"""Training task of PABBO on perplexity curves, from the start of a study.

The transformer is used in training exactly as in
:class:`~experiments.pabbo_lda.optimizers.pabbo.CurvePABBO`: its context is the duels of the
best T so far with all others, each with the degree of the preference; a candidate is a duel of
the best T with an unknown T, and its score is the mean of both orders.

The target of a score is minus the expected distance in log T to the nearest T whose perplexity is
within the tolerance of the curve's minimum. The smallest expected distance is at the median of the
remaining T, so that choosing the best score bisects under noise (Horstein 1963; Waeber, Frazier
and Henderson 2013: probabilistic bisection). In training, the distances of all candidates are
known, so the scores are fitted to them by least squares on the states that the policy reaches. A
policy gradient on the same distances settled early on the smallest T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from experiments.pabbo_lda.optimizers.pabbo import DECIDED, UNIT
from experiments.pabbo_lda.pabbo.curves import Curves, CurveSettings, sample_curves
from experiments.pabbo_lda.pabbo.evaluation import HELD_OUT
from experiments.pabbo_lda.pabbo.functions import pick, summed
from experiments.pabbo_lda.pabbo.model import PabboModel, PabboModelSettings
from experiments.pabbo_lda.pabbo.training import PreferenceTask
from raypipe import Loss, Operational, Settings, StepContext, keyed_random

#: stream of the keyed draws, apart from those of the curves
STREAM_STUDY = 34


class CurvePolicySettings(Settings):
    """Training of PABBO on perplexity curves."""

    model: PabboModelSettings = PabboModelSettings(layers=2, embedding_depth=3)
    """Size of the transformer."""
    curves: CurveSettings = CurveSettings()
    """Distribution of the training curves."""
    points: PositiveInt = 48
    """Candidate values of T per curve."""
    steps: PositiveInt = 10
    """Evaluations per curve after the start."""
    tolerance: PositiveFloat = 0.01
    """Largest excess over the minimal log-perplexity that counts as close."""
    temperature: PositiveFloat = 0.1
    """Temperature of the choices in training, in units of log T."""
    held_out: Operational[PositiveInt] = 256
    """Number of held-out curves of the evaluation during the training."""

    @property
    def distribution(self) -> CurveSettings:
        """The distribution of the samples."""
        return self.curves

    @model_validator(mode="after")
    def _enough_points(self) -> CurvePolicySettings:
        span = self.curves.t_max[0] - self.curves.t_min + 1
        if not self.steps <= self.points <= span:
            raise ValueError(
                f"points = {self.points} must lie between steps = {self.steps} and the {span} "
                "values of T of the shortest range"
            )
        return self


class CurvePolicyTask(PreferenceTask):
    """Training of PABBO on perplexity curves; a sample is a curve."""

    def loss(self, model: PabboModel, batch: Tensor, context: StepContext) -> Loss:
        """Return the loss of the curves ``batch``, an int64 ``[B]``."""
        s = self.settings
        dtype = next(model.parameters()).dtype
        curves = sample_curves(context.seed, batch, s.points, s.curves, dtype)
        noise = keyed_random.gumbel(context.seed, STREAM_STUDY, batch, s.steps * s.points, dtype)
        noise = s.temperature * noise.view(-1, s.steps, s.points)
        scores, best = studies(model, curves, s.steps, noise)
        distance = distance_to_close(curves, s.tolerance)[:, None, -s.points :]
        loss = (scores + distance).square().mean((1, 2))
        left = excess(curves).gather(1, best[:, -1:])[:, 0]
        return Loss(loss.sum(), len(batch), summed({"error": loss, "excess": left}))

    def evaluate(
        self, model: PabboModel, device: torch.device, batch_size: int
    ) -> Mapping[str, float]:
        """Return how fast the policy comes close on held-out curves whose start is not close."""
        del batch_size
        s = self.settings
        samples = HELD_OUT + torch.arange(s.held_out, device=device)
        curves = sample_curves(0, samples, s.points, s.curves)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            _, best = studies(model, curves, s.steps, None)
        # 0 where the start is close, which does not count
        used = (excess(curves).gather(1, best) > s.tolerance).sum(1)
        used = used[used > 0].double()
        return {
            "evaluations": used.mean().item(),  # counts steps + 1 where they were too few
            "within_5": (used <= 5).double().mean().item(),
        }


def excess(curves: Curves) -> Tensor:
    """Return log-perplexities ``[B, S + N]`` above the minimum; infinite where not started."""
    loss = curves.loss.clone()
    size = curves.started.shape[1]
    loss[:, :size] = loss[:, :size].masked_fill(~curves.started, torch.inf)
    return loss - loss.amin(1, keepdim=True)


def distance_to_close(curves: Curves, tolerance: float) -> Tensor:
    """Return distances in log T ``[B, S + N]`` to the nearest T within the tolerance."""
    place = torch.log(curves.T.to(curves.loss.dtype))
    gap = (place[:, :, None] - place[:, None, :]).abs()
    far = excess(curves) > tolerance
    return gap.masked_fill(far[:, None], torch.inf).amin(2)


def degree(second: Tensor, margin: Tensor) -> Tensor:
    """Return the degree in [0, 1] to which the second of a duel is preferred.

    ``second`` is whether it won, ``margin`` the difference of the log-perplexities.
    """
    certainty = torch.log1p(margin / UNIT) / math.log1p(DECIDED)
    certainty = certainty.clamp(max=1)
    return torch.where(second, 1 + certainty, 1 - certainty) / 2


def studies(
    model: PabboModel, curves: Curves, steps: int, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run a study of ``steps`` evaluations after the start on all curves together.

    Each step chooses the candidate with the best score, or with ``noise`` ``[B, steps, N]`` the
    one with the best sum of both: Gumbel noise draws from the softmax of the scores.

    Returns:
        the scores ``[B, steps, N]`` of the candidates at each step, and the index
        ``[B, steps + 1]`` into S + N of the best T before each step and at the end.

    """
    loss = curves.loss
    batch, size = curves.started.shape
    n = loss.shape[1] - size
    known = curves.started
    order = torch.arange(size, device=loss.device).expand(batch, size)
    candidates = torch.arange(size, size + n, device=loss.device).expand(batch, n)
    asked = torch.zeros_like(candidates, dtype=torch.bool)
    best = loss[:, :size].masked_fill(~known, torch.inf).argmin(1, keepdim=True)
    targets = model.embed_points(curves.points)
    every, bests = [], [best]
    for step in range(steps):
        # the best T alternates between the sides of its duels
        others = known & (order != best)
        second = others.cumsum(1) % 2 == 0
        duels = torch.stack((best.expand_as(order), order), 2)
        duels = torch.where(second[..., None], duels.flip(2), duels)
        margin = F.relu(loss.gather(1, order) - loss.gather(1, best))
        context = model.embed_duels(pick(curves.points, duels), degree(second, margin))
        encoded = model(context[:, None], targets, others[:, None])
        pairs = torch.stack((best.expand_as(candidates), candidates), 2)
        scores = model.score(encoded, torch.cat((pairs, pairs.flip(2)), 1), 1.0)
        scores = scores.view(batch, 2, n).mean(1)
        every.append(scores)
        drawn = scores.detach() if noise is None else scores.detach() + noise[:, step]
        choice = drawn.masked_fill(asked, -torch.inf).argmax(1, keepdim=True)
        asked = asked.scatter(1, choice, True)
        chosen = size + choice
        order = torch.cat((order, chosen), 1)
        known = torch.cat((known, torch.ones_like(known[:, :1])), 1)
        best = torch.where(loss.gather(1, chosen) < loss.gather(1, best), chosen, best)
        bests.append(best)
    return torch.stack(every, 1), torch.cat(bests, 1)
