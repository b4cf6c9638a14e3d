"""Training of PABBO (Zhang et al., ICLR 2025, section 4): burn-in on preferences, then the policy.

Burn-in: a random part of each function's duels is context, and the model predicts the winners of
the others. Policy: trajectories of T duels on each function, drawn from the acquisition head,
together with the prediction loss. A function's losses depend only on its keyed draws, made on the
model's device, so that any split of a batch into micro-batches has the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from experiments.pabbo_lda.pabbo.evaluation import EvaluationSettings, check_pairs, evaluate_model
from experiments.pabbo_lda.pabbo.functions import (
    Candidates,
    SyntheticFunctionSettings,
    draw_pairs,
    sample_functions,
    summed,
)
from experiments.pabbo_lda.pabbo.model import PabboModel, PabboModelSettings
from raypipe import (
    Loss,
    Operational,
    Phase,
    Settings,
    StepContext,
    TrainingSettings,
    TrainTask,
    keyed_random,
)

#: streams of the keyed draws, apart from those of the functions
STREAM_DUELS, STREAM_SPLITS, STREAM_SIZES, STREAM_CANDIDATES, STREAM_ACTIONS = range(10, 15)
_PROBIT = torch.pi / 8
_LEAST_SPREAD = 1e-3  # of utilities, so that the rounding of a flat function has little weight


class PabboSettings(Settings):
    """Training of PABBO.

    The defaults are the recipe measured in docs/pabbo.md for a CPU, with an effective batch of 32,
    a learning rate of 3e-3 and gradients clipped at 1. Published: ``policy_gradient=published``,
    ``policy_learning_rate=3e-5``, ``prediction_splits`` = horizon + 1, burn-in 3000 of 8000 steps,
    16 x 20 trajectories of 64 duels, 100 points and pairs; quick: burn-in 800 of 2000 steps, 8 x 10
    trajectories of 30 duels, 50 points and pairs.
    """

    model: PabboModelSettings = PabboModelSettings()
    """Size of the transformer."""
    functions: SyntheticFunctionSettings = SyntheticFunctionSettings()
    """Distribution of the training functions."""
    evaluation: Operational[EvaluationSettings] = EvaluationSettings(
        functions=20, starts=1, candidate_pairs=256
    )
    """Small evaluation on held-out functions during the training."""
    burn_in: float = Field(0.6, ge=0, le=1)
    """Fraction of the steps before the policy phase."""
    policy_batch: PositiveInt = 32
    """Functions per step of the policy phase."""
    trajectories: PositiveInt = 1
    """Trajectories per function."""
    horizon: PositiveInt = 30
    """Duels per trajectory."""
    query_points: PositiveInt = 64
    """Points per function from which the trajectories choose."""
    candidate_pairs: PositiveInt = 256
    """Pairs of the query points that a trajectory can choose as duels."""
    prediction_points: PositiveInt = 50
    """Points per function of the duels of the prediction loss."""
    prediction_duels: PositiveInt = 50
    """Duels per function of the prediction loss, context and targets together."""
    prediction_splits: PositiveInt = 4
    """Random splits per function into context and targets."""
    max_context: PositiveInt = 20
    """Maximum number of duels in the context of a split."""
    discount: float = Field(0.98, gt=0, le=1)
    """Discount of the reward per step."""
    policy_gradient: Literal["published", "expected_improvement"] = "expected_improvement"
    """Policy loss: REINFORCE with returns standardized over each trajectory, as published, or the
    expected improvement over all candidates, which needs far fewer trajectories.
    """
    policy_learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of the policy phase."""
    prediction_weight: float = Field(1.0, ge=0)
    """Weight of the prediction loss in the policy phase."""

    @property
    def distribution(self) -> SyntheticFunctionSettings:
        """The distribution of the samples."""
        return self.functions

    @model_validator(mode="after")
    def _fit_together(self) -> PabboSettings:
        check_pairs(self, "candidate_pairs", "query_points")
        check_pairs(self, "prediction_duels", "prediction_points")
        if self.horizon > self.candidate_pairs:
            raise ValueError(
                f"horizon={self.horizon} exceeds candidate_pairs={self.candidate_pairs}"
            )
        if self.max_context >= self.prediction_duels:
            raise ValueError(f"max_context={self.max_context} leaves none of the prediction_duels")
        return self


class GeneratedTask(TrainTask):
    """Training of a model on samples that are drawn from their numbers.

    ``settings`` is the section of the training, with the size of the model in ``model``.
    """

    shuffle = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings


class PreferenceTask(GeneratedTask):
    """Training of PABBO's transformer."""

    unused_parameters = True  # a phase may use one head only
    compile_loss = False  # a loop over duels would be unrolled

    def build_model(self) -> PabboModel:
        """Return the transformer of the settings."""
        return PabboModel(self.settings.model)

    def metadata(self) -> Mapping[str, str]:
        """Return the model's size, and the distribution of its samples."""
        return {
            "model": self.settings.model.model_dump_json(),
            "trained_on": self.settings.distribution.model_dump_json(),
        }


class PabboTask(PreferenceTask):
    """Training of PABBO on synthetic functions; a sample is a function."""

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """Return the burn-in with the training batch, then the policy phase with its own batch."""
        s, steps = self.settings, training.length
        burn_in = round(s.burn_in * steps)
        phases = (
            Phase("burn_in", burn_in, effective_batch, training.learning_rate),
            Phase("policy", steps - burn_in, s.policy_batch, s.policy_learning_rate),
        )
        return [phase for phase in phases if phase.steps]

    def loss(self, model: PabboModel, batch: Tensor, context: StepContext) -> Loss:
        """Return the loss of the functions ``batch``, an int64 ``[B]``."""
        s, seed, n = self.settings, context.seed, self.settings.prediction_points
        dtype, policy = next(model.parameters()).dtype, context.phase.name == "policy"
        points = n + s.query_points if policy else n
        drawn = sample_functions(seed, batch, points, s.functions, with_best=policy, dtype=dtype)
        prediction, accuracy = _prediction(
            model, drawn.points[:, :n], drawn.utility[:, :n], batch, seed, s
        )
        metrics = {"prediction_loss": prediction, "accuracy": accuracy}
        if not policy:
            return Loss(prediction.sum(), len(batch), summed(metrics))
        pairs = draw_pairs(seed, STREAM_CANDIDATES, batch, s.query_points, s.candidate_pairs)
        candidates = Candidates.of(drawn.points[:, n:], drawn.utility[:, n:], pairs)
        # a GPU waits for the launch of kernels, a CPU computes
        trajectories = _trajectories if batch.device.type == "cpu" else _trajectories_at_once
        log_probs, chosen = trajectories(model, candidates, batch, seed, s)
        # the better end of each candidate, and the best so far after each step
        gains = candidates.utility.amax(2)
        best = _rows(gains[..., None], chosen)[..., 0].cummax(2).values
        if s.policy_gradient == "published":
            loss = reinforce(log_probs, chosen, best, s.discount)
        else:
            loss = expected_improvement(log_probs, gains, best, s.discount)
        metrics |= {
            "policy_loss": loss, "simple_regret": drawn.best_utility - best[:, :, -1].mean(1)
        }  # fmt: skip
        return Loss((loss + s.prediction_weight * prediction).sum(), len(batch), summed(metrics))

    def evaluate(
        self, model: PabboModel, device: torch.device, batch_size: int
    ) -> Mapping[str, float]:
        """Return the simple regret on held-out functions, of the model and of random search."""
        s = self.settings
        return evaluate_model(model, s.evaluation, s.functions, device, batch_size)


def _prediction(
    model: PabboModel, points: Tensor, utility: Tensor, samples: Tensor, seed: int, s: PabboSettings
) -> tuple[Tensor, Tensor]:
    """Return binary cross-entropy and accuracy of predicted winners, each ``[B]``.

    In each random split, 1 to ``max_context`` of the duels are context. The model's Gaussian
    utilities give the probability of a win by MacKay's approximation of the expected sigmoid
    (Neural Computation 4, 1992); the published code draws one sample instead.
    """
    batch, splits, duels = len(samples), s.prediction_splits, s.prediction_duels
    pairs = draw_pairs(seed, STREAM_DUELS, samples, points.shape[1], duels)
    known = Candidates.of(points, utility, pairs)
    keys = keyed_random.words(seed, STREAM_SPLITS, samples, splits * duels)
    order = keys.view(batch, splits, duels).argsort(2)
    sizes = keyed_random.uniform(seed, STREAM_SIZES, samples, splits)
    sizes = 1 + (sizes * s.max_context).long()
    place = torch.arange(duels, device=samples.device)

    tokens = model.embed_duels(known.duels, known.preferred)
    context = _rows(tokens, order[:, :, : s.max_context])
    mask = place[: s.max_context] < sizes[:, :, None]
    mean, std = model.predict(model(context, model.embed_points(points), mask))

    ends = pairs.flatten(1)[:, None].expand(-1, splits, -1)
    mean = mean.gather(2, ends).view(batch, splits, duels, 2)
    variance = std.square().gather(2, ends).view(batch, splits, duels, 2).sum(3)
    logit = (mean[..., 1] - mean[..., 0]) / torch.sqrt(1 + _PROBIT * variance)
    truth = known.preferred[:, None].expand_as(logit)
    target = torch.ones_like(order, dtype=torch.bool)
    target = target.scatter(2, order, place >= sizes[:, :, None])
    count = target.sum(2)
    error = F.binary_cross_entropy_with_logits(logit, truth.to(logit.dtype), reduction="none")
    right = ((logit > 0) == truth.bool()) & target
    loss = ((error * target).sum(2) / count).mean(1)
    return loss, (right.sum(2) / count).mean(1)


def _trajectories(
    model: PabboModel, candidates: Candidates, samples: Tensor, seed: int, s: PabboSettings
) -> tuple[Tensor, Tensor]:
    """Return R trajectories: log-probabilities ``[B, R, T, P]`` and chosen duels ``[B, R, T]``.

    Duels are drawn without replacement from the softmax of the scores (Gumbel-max), starting from
    an empty context.
    """
    batch, runs, steps, pairs = len(samples), s.trajectories, s.horizon, s.candidate_pairs
    noise = keyed_random.gumbel(seed, STREAM_ACTIONS, samples, runs * steps * pairs)
    noise = noise.view(batch, runs, steps, pairs)
    targets = model.embed_points(candidates.points)
    tokens = model.embed_duels(candidates.duels, candidates.preferred)
    chosen = torch.empty(batch, runs, 0, dtype=torch.int64, device=samples.device)
    asked = torch.zeros(batch, runs, pairs, dtype=torch.bool, device=samples.device)
    log_probs = []
    for step in range(steps):
        encoded = model(_rows(tokens, chosen), targets)
        scores = model.score(encoded, candidates.pairs, (step + 1) / steps)
        logits = scores.masked_fill(asked, -torch.inf)
        action = (logits.detach() + noise[:, :, step]).argmax(2, keepdim=True)
        log_probs.append(torch.log_softmax(logits, 2))
        asked = asked.scatter(2, action, True)
        chosen = torch.cat((chosen, action), 2)
    return torch.stack(log_probs, 2), chosen


def _trajectories_at_once(
    model: PabboModel, candidates: Candidates, samples: Tensor, seed: int, s: PabboSettings
) -> tuple[Tensor, Tensor]:
    """Return the same, with one pass with gradient over all steps, after one without per step.

    That is a third more arithmetic in a third of the kernels: the backward passes are one.
    """
    if not torch.is_grad_enabled():
        return _trajectories(model, candidates, samples, seed, s)
    with torch.no_grad():
        _, chosen = _trajectories(model, candidates, samples, seed, s)
    torch.clear_autocast_cache()  # of weights without gradient
    batch, runs, steps = chosen.shape
    targets = model.embed_points(candidates.points)
    tokens = model.embed_duels(candidates.duels, candidates.preferred)
    first = model.score(model(_rows(tokens, chosen[..., :0]), targets), candidates.pairs, 1 / steps)
    number = torch.arange(1, steps, device=samples.device)
    # after each step but the last, the duels so far are a separate context
    earlier = chosen[..., None, :-1].expand(-1, -1, steps - 1, -1).flatten(1, 2)
    mask = (number - 1 < number[:, None]).expand(batch, runs, -1, -1).flatten(1, 2)
    used = ((number + 1) / steps).repeat(runs)
    later = model.score(model(_rows(tokens, earlier), targets, mask), candidates.pairs, used)
    logits = torch.cat((first[:, :, None], later.unflatten(1, (runs, steps - 1))), 2)
    taken = F.one_hot(chosen, logits.shape[3])
    asked = taken.cumsum(2) > taken
    return torch.log_softmax(logits.masked_fill(asked, -torch.inf), 3), chosen


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Return rows ``[B, R, K, d]`` of each function's ``[B, P, d]`` at ``index`` ``[B, R, K]``."""
    first = torch.arange(len(table), device=table.device) * table.shape[1]
    flat = (index + first[:, None, None]).flatten()
    return table.flatten(0, 1).index_select(0, flat).view(*index.shape, table.shape[2])


def reinforce(log_probs: Tensor, chosen: Tensor, best: Tensor, discount: float) -> Tensor:
    """Return the published policy loss ``[B]``: REINFORCE over R trajectories of T steps.

    The discounted rewards ``best`` ``[B, R, T]`` (best utility so far) are standardized over each
    trajectory and weight the log-probabilities of its duels.
    """
    returns = best * discount ** torch.arange(best.shape[2], device=best.device)
    centered = returns - returns.mean(2, keepdim=True)
    weight = centered / (returns.std(2, keepdim=True) + torch.finfo(torch.float32).eps)
    taken = log_probs.gather(3, chosen[..., None])[..., 0]
    return -(weight * taken).sum(2).mean(1)


def expected_improvement(
    log_probs: Tensor, utility: Tensor, best: Tensor, discount: float
) -> Tensor:
    """Return a policy loss ``[B]`` from the known outcomes of all candidates, not only the drawn.

    In training, the utilities ``[B, P]`` of all candidates are known, so the expected improvement
    of the best utility at each step is a sum over the policy, without the noise of the draw
    (Allen et al.: Mean actor-critic, 2017). An improvement lasts to the end, so its weight is the
    discounted number of remaining steps. This equals the return of REINFORCE without the effect of
    a duel on later choices: less noise for some bias. Utilities are scaled by their spread over
    the candidates of the function.
    """
    steps = best.shape[2]
    remaining = torch.arange(steps, 0, -1, device=best.device)
    powers = discount ** torch.arange(steps, device=best.device, dtype=best.dtype)
    weight = powers.cumsum(0)[remaining - 1] / steps
    before = torch.cat((utility.amin(1)[:, None, None].expand_as(best[..., :1]), best[..., :-1]), 2)
    gain = F.relu(utility[:, None, None] - before[..., None])
    scale = utility.std(1)[:, None] + _LEAST_SPREAD
    expected = (log_probs.exp() * gain).sum(3) * weight
    return -(expected.sum(2) / scale).mean(1)
