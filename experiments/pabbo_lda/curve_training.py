"""Training of PABBO's transformer as an optimiser of T, on curves and from a study's start.

The transformer is used in training exactly as in :mod:`experiments.pabbo_lda.optimizers.pabbo`: the
context are the duels of the best T so far with all the others, a candidate is a duel of the best
with an unknown T, and its score is the mean of both orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from experiments.pabbo_lda.curves import Curves, CurveSettings, sample_curves
from experiments.pabbo_lda.duels import pick, summed
from experiments.pabbo_lda.evaluation import HELD_OUT
from experiments.pabbo_lda.model import ModelSettings, PabboModel
from raypipe.settings import Settings
from raypipe.training import keyed_random
from raypipe.training.task import Loss, SampleIds, StepContext, TrainTask

STREAM_ACTIONS = 40


class CurvePolicySettings(Settings):
    """What the optimiser of curves trains on."""

    model: ModelSettings = Field(ModelSettings(layers=2), description="the transformer")
    curves: CurveSettings = Field(CurveSettings(), description="training curves")
    points: PositiveInt = Field(48, description="values of T a curve")
    steps: PositiveInt = Field(10, description="evaluations after the start")
    tolerance: PositiveFloat = Field(0.01, description="of the log-perplexity that is close")
    held_out: PositiveInt = Field(256, description="curves of the measure beside the training")

    @model_validator(mode="after")
    def _enough(self) -> CurvePolicySettings:
        if self.steps > self.points:
            raise ValueError(f"points = {self.points} are fewer than the steps")
        return self


class CurvePolicyTask(TrainTask):
    """A sample is a curve."""

    shuffle = False
    unused_parameters = True
    compile_loss = False

    def __init__(self, settings: CurvePolicySettings) -> None:
        self.settings = settings

    def build_model(self) -> PabboModel:
        return PabboModel(self.settings.model)

    def metadata(self) -> Mapping[str, str]:
        return {"model": self.settings.model.model_dump_json()}

    def build_dataset(self) -> Dataset[int]:
        return SampleIds()

    def loss(self, model: PabboModel, batch: Tensor, context: StepContext) -> Loss:
        s = self.settings
        dtype = next(model.parameters()).dtype
        curves = sample_curves(context.seed, batch, s.points, s.curves, dtype)
        noise = keyed_random.gumbel(context.seed, STREAM_ACTIONS, batch, s.steps * s.points, dtype)
        log_probs, actions, _ = rollout(model, curves, s.steps, noise.view(-1, s.steps, s.points))
        first = curves.started.shape[1]
        distance = distance_to_close(curves, s.tolerance)
        regret = distance[:, None, first:]
        loss = (log_probs.exp() * regret).sum(2).mean(1)
        return Loss(loss.sum(), len(batch), summed({"utility": loss}))

    def evaluate(self, model, device, batch_size):
        s = self.settings
        used = evaluations_to(model, s, HELD_OUT + torch.arange(s.held_out, device=device))
        used = used[used > 0]
        return {"n": len(used), "within_5": (used <= 5).float().mean().item(), "median": used.median().item(),
                "mean_capped": used.mean().item()}


def distance_to_close(curves: Curves, tolerance: float) -> Tensor:
    """Distance in log T to the nearest T within the tolerance ``[B, S + N]``."""
    x = torch.log(curves.T).to(curves.loss.dtype)
    close = excess(curves) <= tolerance
    gap = (x[:, :, None] - x[:, None, :]).abs()
    return gap.masked_fill(~close[:, None], torch.inf).amin(2)


def excess(curves: Curves) -> Tensor:
    """Log-perplexity above the least of the curve ``[B, S + N]``."""
    missing = torch.ones_like(curves.loss, dtype=torch.bool)
    missing[:, : curves.started.shape[1]] = curves.started
    least = curves.loss.masked_fill(~missing, torch.inf).amin(1, keepdim=True)
    return F.relu(curves.loss - least)


@torch.no_grad()
def evaluations_to(model: PabboModel, s: CurvePolicySettings, samples: Tensor, seed: int = 0) -> Tensor:
    """Evaluations beyond the start ``[B]`` until the tolerance, one more than the steps if never."""
    curves = sample_curves(seed, samples, s.points, s.curves)
    *_, best = rollout(model, curves, s.steps, None)
    return (excess(curves).gather(1, best) > s.tolerance).float().sum(1)


def degree(second: Tensor, margin: Tensor) -> Tensor:
    """How much the second of a duel is preferred, in [0, 1], from who won and by how much."""
    import os
    if os.environ.get("HARD"):
        return second.to(margin.dtype)
    certainty = (torch.log1p(margin.clamp(min=0) / 0.01) / 9.2104).clamp(max=1)
    return torch.where(second, 1 + certainty, 1 - certainty) / 2


def rollout(
    model: PabboModel, curves: Curves, steps: int, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Studies of ``steps`` evaluations after the start, one a curve, all together.

    Candidates are drawn from the softmax of the scores by Gumbel ``noise`` ``[B, steps, N]``, or
    without it the one scored best is taken.

    Returns:
        the log-probabilities ``[B, steps, N]`` of the candidates at each step, and the index
        ``[B, steps + 1]`` of the best T known before each step and at the end.

    """
    started, loss = curves.started, curves.loss
    batch, first = started.shape
    n = loss.shape[1] - first
    known = started
    order = torch.arange(first, device=loss.device).expand(batch, first)
    candidate = torch.arange(first, first + n, device=loss.device).expand(batch, n)
    asked = torch.zeros(batch, n, dtype=torch.bool, device=loss.device)
    best = loss[:, :first].masked_fill(~started, torch.inf).argmin(1, keepdim=True)
    targets = model.embed_points(curves.points)
    log_probs, actions, bests = [], [], [best]
    for step in range(steps):
        # duels with the best, which is the first and the second of them in turn
        others = known & (order != best)
        second = others.cumsum(1) % 2 == 0
        ends = torch.stack((best.expand_as(order), order), 2)
        ends = torch.where(second[..., None], ends.flip(2), ends)
        margin = loss.gather(1, order) - loss.gather(1, best)
        tokens = model.embed_duels(pick(curves.points, ends), degree(second, margin))
        encoded = model(tokens[:, None], targets, others[:, None])
        pairs = torch.stack((best.expand_as(candidate), candidate), 2)
        scores = model.score(encoded, torch.cat((pairs, pairs.flip(2)), 1), 1.0)
        scores = scores.view(batch, 2, n).mean(1).masked_fill(asked, -torch.inf)
        log_probs.append(torch.log_softmax(scores, 1))
        drawn = scores.detach() if noise is None else scores.detach() + noise[:, step]
        action = drawn.argmax(1, keepdim=True)
        actions.append(action)
        asked = asked.scatter(1, action, True)
        order = torch.cat((order, first + action), 1)
        known = torch.cat((known, torch.ones_like(known[:, :1])), 1)
        better = loss.gather(1, first + action) < loss.gather(1, best)
        best = torch.where(better, first + action, best)
        bests.append(best)
    return torch.stack(log_probs, 1), torch.cat(actions, 1), torch.cat(bests, 1)
