"""The PABBO transformer (Zhang et al., ICLR 2025, section 3): duels in, utilities and scores out.

The architecture follows the paper: embeddings of context duels and of target points, encoder
layers with normalisation after each block in which every token attends to the context only, a
Gaussian prediction head and an acquisition head over pairs of targets. ``R`` contexts share one
function's targets, so that many prediction splits or trajectories are one forward.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from raypipe.config.settings import Settings
from raypipe.training.weights import parse_weights


class ModelSettings(Settings):
    """The size of the transformer; the defaults are the small one."""

    d_model: PositiveInt = Field(32, description="width of a token")
    heads: PositiveInt = Field(2, description="attention heads")
    layers: PositiveInt = Field(3, description="encoder layers")
    feed_forward: PositiveInt = Field(64, description="hidden width of the layers and heads")
    embedding_depth: int = Field(2, ge=2, description="linear layers of a point's embedding")

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSettings:
        if self.d_model % self.heads:
            raise ValueError(f"heads={self.heads} must divide d_model={self.d_model}")
        return self


SMALL = ModelSettings()
LARGE = ModelSettings(d_model=64, heads=4, layers=6, feed_forward=128, embedding_depth=3)


def _mlp(width_in: int, width: int, width_out: int, depth: int) -> nn.Sequential:
    """``depth`` linear layers with rectifiers between them."""
    widths = [width_in, *[width] * (depth - 1)]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], width_out))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention ``[M, H, L, e]`` of queries to keys ``[M, H, C, e]``.

    On a CPU PyTorch's fused kernel is slow with so few keys (a context is some twenty duels).
    There the scores are laid out keys by queries, which makes a policy step a tenth faster.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    scores = key @ (query * query.shape[-1] ** -0.5).transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask.transpose(2, 3), -torch.inf)
    attended: Tensor = value.transpose(2, 3) @ scores.softmax(2)
    return attended.transpose(2, 3)


class EncoderLayer(nn.Module):
    """Attention to the context, then a feed-forward block, each added and then normalised."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        d = settings.d_model
        self.heads = settings.heads
        self.query_key_value = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.norm_attention = nn.LayerNorm(d)
        self.up = nn.Linear(d, settings.feed_forward)
        self.down = nn.Linear(settings.feed_forward, d)
        self.norm_feed_forward = nn.LayerNorm(d)
        nn.init.xavier_uniform_(self.query_key_value.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, tokens: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens ``[M, L, d]`` after attending to the context ``[M, C, d]``.

        ``mask``, bool ``[M, 1, 1, C]``, is true where a context token counts.
        """
        tokens = self.norm_attention(tokens + self.out(self._attend(tokens, context, mask)))
        tokens = tokens + self.down(F.relu(self.up(tokens)))
        output: Tensor = self.norm_feed_forward(tokens)
        return output

    def _attend(self, tokens: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        if context.shape[1] == 0:
            return torch.zeros_like(tokens)
        d = tokens.shape[-1]
        weight, bias = self.query_key_value.weight, self.query_key_value.bias
        query = F.linear(tokens, weight[:d], bias[:d])
        key, value = F.linear(context, weight[d:], bias[d:]).chunk(2, dim=-1)
        query, key, value = (
            t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in (query, key, value)
        )
        return attend(query, key, value, mask).transpose(1, 2).flatten(2)


class PabboModel(nn.Module):
    """Embeds duels and points, encodes points given duels (``forward``), predicts and scores."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        d, hidden = settings.d_model, settings.feed_forward
        self.first = _mlp(1, d, d, settings.embedding_depth)
        self.second = _mlp(1, d, d, settings.embedding_depth)
        # the third row is the paper's unknown preference; it keeps the published parameter count
        self.preference = nn.Embedding(3, d)
        self.layers = nn.ModuleList(EncoderLayer(settings) for _ in range(settings.layers))
        self.prediction = _mlp(d, hidden, 2, 2)
        self.acquisition_entry = nn.Linear(2 * d + 1, hidden)
        self.acquisition = _mlp(hidden, hidden, 1, 2)

    def embed_points(self, points: Tensor) -> Tensor:
        """Target tokens ``[..., d]`` of points ``[...]`` in [-1, 1]."""
        tokens: Tensor = self.first(points[..., None])
        return tokens

    def embed_duels(self, duels: Tensor, preferred: Tensor) -> Tensor:
        """Context tokens ``[..., d]`` of duels ``[..., 2]``.

        ``preferred`` ``[...]`` is 0 or 1, or as floating point a degree between them, whose
        embedding is interpolated.
        """
        if preferred.is_floating_point():
            first, second = self.preference.weight[:2]
            preference = torch.lerp(first, second, preferred[..., None])  # exact at both ends
        else:
            preference = self.preference(preferred)
        tokens: Tensor = self.first(duels[..., :1]) + self.second(duels[..., 1:]) + preference
        return tokens

    def forward(self, context: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encoded targets ``[B, R, N, d]``: tokens ``[B, N, d]`` seen from R contexts each.

        ``context`` is ``[B, R, C, d]`` (C may be 0), ``mask`` a bool ``[B, R, C]``, true where a
        duel counts, at least one for each context.
        """
        functions, contexts, size, _ = context.shape
        shared = targets[:, None].expand(-1, contexts, -1, -1)
        tokens = torch.cat((context, shared), dim=2).flatten(0, 1)
        seen = None if mask is None else mask.flatten(0, 1)[:, None, None, :]
        for layer in self.layers[:-1]:
            tokens = layer(tokens, tokens[:, :size], seen)
        # nothing reads the context after the last layer
        tokens = self.layers[-1](tokens[:, size:], tokens[:, :size], seen)
        encoded: Tensor = tokens.view(functions, contexts, *tokens.shape[1:])
        return encoded

    def predict(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation ``[...]`` of the utility at encoded targets ``[..., d]``."""
        mean, spread = self.prediction(encoded).unbind(-1)
        return mean, F.softplus(spread)

    def score(self, encoded: Tensor, pairs: Tensor, budget_used: float) -> Tensor:
        """Acquisition scores ``[B, R, P]`` of pairs ``[B, P, 2]`` of encoded ``[B, R, N, d]``.

        ``budget_used`` is t/T: the running number of the duel to choose over the budget.
        """
        functions, contexts, points, _ = encoded.shape
        entry, d = self.acquisition_entry, self.settings.d_model
        # the first layer is linear in each end, so it is applied to the points, not to the pairs
        ends = F.linear(encoded, torch.cat((entry.weight[:, :d], entry.weight[:, d : 2 * d])))
        first, second = ends.flatten(0, 2).chunk(2, dim=1)
        start = torch.arange(functions * contexts, device=encoded.device) * points
        index = pairs[:, None] + start.view(functions, contexts, 1, 1)
        hidden = first.index_select(0, index[..., 0].flatten())
        hidden = hidden + second.index_select(0, index[..., 1].flatten())
        hidden = F.relu(hidden + (entry.bias + budget_used * entry.weight[:, -1]))
        scores: Tensor = self.acquisition(hidden).view(functions, contexts, -1)
        return scores


def score_pairs(
    model: PabboModel,
    duels: Tensor,
    preferred: Tensor,
    points: Tensor,
    pairs: Tensor,
    budget_used: float,
) -> Tensor:
    """Scores ``[P]`` of candidate pairs of points after the duels so far; larger is better.

    Args:
        model: a trained model.
        duels: ``[D, 2]`` points compared so far, in [-1, 1]; D may be 0.
        preferred: ``[D]`` 0 where the first point of the duel has won, 1 where the second, or a
            degree between, in floating point.
        points: ``[N]`` candidate points in [-1, 1].
        pairs: ``[P, 2]`` int64, the candidate pairs as indices into ``points``.
        budget_used: t/T, the running number of the duel to choose over the budget.

    """
    with torch.no_grad():
        context = model.embed_duels(duels, preferred)
        encoded = model(context[None, None], model.embed_points(points)[None])
        return model.score(encoded, pairs[None], budget_used)[0, 0]


def load_model(path: Path) -> PabboModel:
    """The model that a training run has left, by its file alone, ready for inference.

    Raises:
        ValueError: the file holds no PABBO model.

    """
    content = path.read_bytes()
    try:
        _, metadata = parse_weights(content)
    except ValueError as error:
        raise ValueError(f"{path} holds no PABBO model: {error}") from error
    if "model" not in metadata:
        raise ValueError(f"{path} holds no PABBO model: its metadata lack the key 'model'")
    return restore_model(ModelSettings.model_validate_json(metadata["model"]), content)


def restore_model(settings: ModelSettings, weights: bytes) -> PabboModel:
    """The model from the content of a safetensors file, on the CPU, ready for inference."""
    model = PabboModel(settings)
    model.load_state_dict(parse_weights(weights)[0])
    return model.eval()
