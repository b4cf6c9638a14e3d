"""Prior-fitted network (Mueller et al., ICLR 2022): the posterior of a function in one pass.

A transformer reads the evaluated points of a function and returns, for each query point, the
distribution of its value as a mixture of normal distributions. Every token attends to the evaluated
points only, so the order of these points does not matter and queries do not see each other. As in
ALiBi (Press et al. 2022), attention has a bias that depends on the distance of two points; here it
is learned.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from raypipe import Settings, weights

#: largest number of dimensions; points of fewer have zeros in the others
DIMENSIONS = 3
#: values are cut to this size, so that squares of their differences are finite
LARGEST = 1e100
#: frequencies of the Fourier features of a coordinate; the period is 2 divided by it
_FREQUENCIES = (0.5, 1.0, 2.0, 4.0)
#: smallest distance that the logarithmic scale resolves
_NEAR = 0.01
#: largest unit of the scale of values, as a multiple of the smallest excess
_WIDEST = 4.0
#: smallest deviation of a component, on the scale of the network
_SHARPEST = 2e-3


class SurrogateSettings(Settings):
    """Size of the network."""

    d_model: PositiveInt = 64
    """Width of a token."""
    heads: PositiveInt = 4
    """Attention heads; they divide `d_model`."""
    layers: PositiveInt = 5
    """Encoder layers."""
    feed_forward: PositiveInt = 160
    """Hidden width of the encoder layers."""
    distance: PositiveInt = 16
    """Hidden width of the bias by distance."""
    components: PositiveInt = 6
    """Normal distributions per predicted value."""

    @model_validator(mode="after")
    def _heads_divide(self) -> SurrogateSettings:
        if self.d_model % self.heads:
            raise ValueError(f"heads={self.heads} must divide d_model={self.d_model}")
        return self


class Mixture:
    """Mixtures of normal distributions ``[..., K]`` on the scale of the network."""

    def __init__(self, raw: Tensor) -> None:
        logits, self.mean, spread = raw.float().chunk(3, dim=-1)
        self.log_weight = logits.log_softmax(-1)
        self.deviation = F.softplus(spread) + _SHARPEST

    def log_density(self, value: Tensor) -> Tensor:
        """Return the log density ``[...]`` at values ``[...]``."""
        z = (value[..., None] - self.mean) / self.deviation
        log_density = -0.5 * z.square() - self.deviation.log() - 0.5 * math.log(2 * math.pi)
        return (self.log_weight + log_density).logsumexp(-1)

    def below_zero(self) -> Tensor:
        """Return the expected amount ``[...]`` by which a value falls below 0."""
        mean, deviation = self.mean.double(), self.deviation.double()
        z = -mean / deviation
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        gain = deviation * (z * torch.special.ndtr(z) + density)
        expected: Tensor = (self.log_weight.double().exp() * gain.clamp(min=0)).sum(-1)
        return expected


class _Layer(nn.Module):
    """Attention to the evaluated points, then a feed-forward block, each normalized before."""

    def __init__(self, settings: SurrogateSettings) -> None:
        super().__init__()
        d = settings.d_model
        self.heads = settings.heads
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key_value = nn.Linear(d, d), nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)
        self.up, self.down = (
            nn.Linear(d, settings.feed_forward),
            nn.Linear(settings.feed_forward, d),
        )

    def forward(self, tokens: Tensor, size: int, bias: Tensor) -> Tensor:
        """Return tokens ``[B, L, d]`` after attending to the first ``size`` of them.

        ``bias``, ``[B, H, L, size]``, is added to the scores.
        """
        batch, length, d = tokens.shape
        normed = self.norm_attention(tokens)
        query = self.query(normed).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = self.key_value(normed[:, :size]).chunk(2, dim=-1)
        key = key.reshape(batch, size, self.heads, -1).permute(0, 2, 3, 1)
        value = value.reshape(batch, size, self.heads, -1).transpose(1, 2)
        scores = query @ key * (d // self.heads) ** -0.5 + bias
        attended = scores.softmax(-1).to(value.dtype) @ value
        tokens = tokens + self.out(attended.transpose(1, 2).flatten(2))
        output: Tensor = tokens + self.down(F.gelu(self.up(self.norm_feed_forward(tokens))))
        return output


class SurrogateModel(nn.Module):
    """Transformer from evaluated points to distributions at query points."""

    def __init__(self, settings: SurrogateSettings) -> None:
        super().__init__()
        self.settings = settings
        d = settings.d_model
        self.place = nn.Linear(DIMENSIONS * (2 + 2 * len(_FREQUENCIES)), d)
        self.value = nn.Linear(3, d)
        self.distance_in = nn.Linear(2 * DIMENSIONS + 1, settings.distance)
        self.distance_out = nn.Linear(settings.distance, settings.layers * settings.heads)
        self.layers = nn.ModuleList(_Layer(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 3 * settings.components)

    def forward(self, known: Tensor, values: Tensor, queries: Tensor, used: Tensor) -> Mixture:
        """Return the distributions ``[B, m]`` of the values at queries.

        Args:
            known: ``[B, n, 3]`` evaluated points in [-1, 1]; 0 in dimensions that do not exist.
            values: ``[B, n]`` their values on the scale of the network (:class:`ValueScale`).
            queries: ``[B, m, 3]`` points to predict.
            used: ``[B, 3]`` 1 for dimensions that exist, else 0.

        """
        n = known.shape[1]
        points = torch.cat((known, queries), 1)
        tokens = self.place(_place_features(points, used))
        count = torch.full_like(values, math.log(n) / 3)
        observed = self.value(torch.stack((values, torch.tanh(4 * values), count), -1))
        tokens = torch.cat((tokens[:, :n] + observed, tokens[:, n:]), 1)
        bias = self.distance_out(F.gelu(self.distance_in(_pair_features(points, known))))
        biases = bias.permute(0, 3, 1, 2).chunk(len(self.layers), dim=1)
        for layer, layer_bias in zip(self.layers, biases, strict=True):
            tokens = layer(tokens, n, layer_bias)
        return Mixture(self.head(self.norm(tokens[:, n:])))


def _place_features(points: Tensor, used: Tensor) -> Tensor:
    """Return features ``[B, L, F]`` of points ``[B, L, 3]``, and of which dimensions exist."""
    waves = points[..., None] * (math.pi * points.new_tensor(_FREQUENCIES))
    exists = used[:, None].expand_as(points)
    return torch.cat((points, exists, waves.sin().flatten(2), waves.cos().flatten(2)), -1)


def _pair_features(points: Tensor, known: Tensor) -> Tensor:
    """Return features ``[B, L, n, F]`` of the differences of points to evaluated points."""
    gap = points[:, :, None] - known[:, None]
    radius = gap.square().sum(-1, keepdim=True).add(1e-12).sqrt()
    logs = torch.log(torch.cat((gap.abs(), radius), -1) + _NEAR)
    return torch.cat((gap, logs), -1)


class ValueScale:
    """Scale of the network, defined by the values ``[B, n]`` of evaluated points.

    The best value is 0. The unit is the excess of one of the next best values (the second, or the
    best eighth), and at most four times that of the first, so that a few good values among very bad
    ones differ. Far from the best value the scale is the logarithm of the logarithm of the
    excess, since values explode where a training diverges.
    """

    def __init__(self, values: Tensor) -> None:
        values = values.double().clamp(-LARGEST, LARGEST)
        self.best = values.amin(1, keepdim=True)
        excess = values - self.best
        excess = excess.masked_fill(excess <= 0, torch.nan).sort(1).values  # nan is last
        positive = (~excess.isnan()).sum(1, keepdim=True)
        rank = (positive // 8).clamp(min=1).minimum(positive - 1).clamp(min=0)
        unit = excess.gather(1, rank).minimum(_WIDEST * excess[:, :1])
        self.unit = torch.where(positive > 0, unit, 1.0).clamp(min=1 / LARGEST)

    def forward(self, values: Tensor) -> Tensor:
        """Return values ``[B, ...]`` on the scale of the network."""
        excess = (values.double().clamp(-LARGEST, LARGEST) - self.best) / self.unit
        excess = excess.clamp(-LARGEST, LARGEST)
        return excess.sign() * excess.abs().log1p().log1p()

    def inverse(self, scaled: Tensor) -> Tensor:
        """Return values ``[B, ...]`` of those on the scale of the network."""
        return self.best + self.unit * scaled.sign() * scaled.abs().expm1().expm1()


def restore_surrogate(content: bytes) -> SurrogateModel:
    """Return the network of the content of a weights file, on the CPU, ready for inference.

    Raises:
        ValueError: the content is damaged, or is not that of a surrogate.

    """
    tensors, metadata = weights.parse_weights(content)
    if "surrogate" not in metadata:
        raise ValueError("its metadata lack the key 'surrogate'")
    model = SurrogateModel(SurrogateSettings.model_validate_json(metadata["surrogate"]))
    model.load_state_dict(tensors)
    return model.eval()
