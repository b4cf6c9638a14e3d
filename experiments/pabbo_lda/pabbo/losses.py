"""Prediction loss and policy loss of PABBO (Zhang et al., ICLR 2025, section 4), summed.

A function's loss depends only on its keyed draws, so that any split of a batch into micro-batches
has the same gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.pabbo_lda.pabbo.duels import Candidates, draw_pairs, summed
from experiments.pabbo_lda.pabbo.model import PabboModel
from experiments.pabbo_lda.pabbo.synthetic_functions import sample_functions
from experiments.pabbo_lda.pabbo.training_settings import PabboSettings
from raypipe.training import keyed_random
from raypipe.training.task import Loss

#: streams of the keyed draws, apart from those of the functions
STREAM_DUELS, STREAM_SPLITS, STREAM_SIZES, STREAM_CANDIDATES, STREAM_ACTIONS = range(10, 15)
_PROBIT = torch.pi / 8
_LEAST_SPREAD = 1e-3  # of utilities, so that the rounding of a flat function has little weight


def burn_in_loss(model: PabboModel, samples: Tensor, seed: int, settings: PabboSettings) -> Loss:
    """Return the prediction loss on functions ``samples``, an int64 ``[B]``."""
    s = settings
    functions = sample_functions(
        seed, samples, s.prediction_points, s.functions, dtype=_dtype(model)
    )
    loss, accuracy = _prediction(model, functions.points, functions.utility, samples, seed, s)
    metrics = {"prediction_loss": loss, "accuracy": accuracy}
    return Loss(loss.sum(), len(samples), summed(metrics))


def policy_loss(model: PabboModel, samples: Tensor, seed: int, settings: PabboSettings) -> Loss:
    """Return the policy and the prediction loss on functions ``samples``, an int64 ``[B]``."""
    s = settings
    n = s.prediction_points
    functions = sample_functions(
        seed, samples, n + s.query_points, s.functions, with_best=True, dtype=_dtype(model)
    )
    prediction, accuracy = _prediction(
        model, functions.points[:, :n], functions.utility[:, :n], samples, seed, s
    )
    pairs = draw_pairs(seed, STREAM_CANDIDATES, samples, s.query_points, s.candidate_pairs)
    candidates = Candidates.of(functions.points[:, n:], functions.utility[:, n:], pairs)
    # a GPU waits for the launch of kernels, a CPU computes
    trajectories = _trajectories if samples.device.type == "cpu" else _trajectories_at_once
    log_probs, chosen = trajectories(model, candidates, samples, seed, s)
    # the better end of each candidate, and the best so far after each step
    gains = candidates.utility.amax(2)
    best = _rows(gains[..., None], chosen)[..., 0].cummax(2).values
    if s.policy_gradient == "published":
        policy = reinforce(log_probs, chosen, best, s.discount)
    else:
        policy = expected_improvement(log_probs, gains, best, s.discount)
    regret = functions.best_utility - best[:, :, -1].mean(1)
    metrics = {
        "policy_loss": policy, "prediction_loss": prediction, "accuracy": accuracy,
        "simple_regret": regret,
    }  # fmt: skip
    total = policy + s.prediction_weight * prediction
    return Loss(total.sum(), len(samples), summed(metrics))


def _dtype(model: PabboModel) -> torch.dtype:
    return next(model.parameters()).dtype


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
