"""PABBO transformer (Zhang et al., ICLR 2025, section 3): from duels to utilities and scores.

The architecture follows the paper: embeddings of context duels and of target points, encoder
layers with normalization after each block in which every token attends to the context only, a
Gaussian prediction head and an acquisition head over pairs of targets. ``R`` contexts share one
function's targets, so that many prediction splits or trajectories are one forward pass.
"""

from __future__ import annotations

from importlib import resources
from itertools import pairwise

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from raypipe import Settings, weights


class PabboModelSettings(Settings):
    """Size of the transformer; the defaults are the small model."""

    d_model: PositiveInt = 32
    """Width of a token."""
    heads: PositiveInt = 2
    """Attention heads; they divide `d_model`."""
    layers: PositiveInt = 3
    """Encoder layers."""
    feed_forward: PositiveInt = 64
    """Hidden width of the encoder layers and of the output heads."""
    embedding_depth: int = Field(2, ge=2)
    """Linear layers of the embedding of a point."""

    @model_validator(mode="after")
    def _heads_divide(self) -> PabboModelSettings:
        if self.d_model % self.heads:
            raise ValueError(f"heads={self.heads} must divide d_model={self.d_model}")
        return self


SMALL = PabboModelSettings()
LARGE = PabboModelSettings(d_model=64, heads=4, layers=6, feed_forward=128, embedding_depth=3)


def _mlp(width_in: int, width: int, width_out: int, depth: int) -> nn.Sequential:
    """Return ``depth`` linear layers with rectifiers between them."""
    widths = [width_in, *[width] * (depth - 1)]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], width_out))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return scaled dot-product attention ``[M, H, L, e]`` of queries to keys ``[M, H, C, e]``.

    On a CPU, PyTorch's fused kernel is slow with few keys (a context is about twenty duels). There
    the scores are laid out keys by queries, which makes a policy step a tenth faster.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    scores = key @ (query * query.shape[-1] ** -0.5).transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask.transpose(2, 3), -torch.inf)
    attended: Tensor = value.transpose(2, 3) @ scores.softmax(2)
    return attended.transpose(2, 3)


class CrossAttentionLayer(nn.Module):
    """Attention to the context, then a feed-forward block, each added and then normalized."""

    def __init__(self, settings: PabboModelSettings) -> None:
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
        """Return the tokens ``[M, L, d]`` after attending to the context ``[M, C, d]``.

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
    """Transformer that embeds duels and points, encodes points given duels, predicts and scores."""

    def __init__(self, settings: PabboModelSettings) -> None:
        super().__init__()
        self.settings = settings
        d, hidden = settings.d_model, settings.feed_forward
        self.first = _mlp(1, d, d, settings.embedding_depth)
        self.second = _mlp(1, d, d, settings.embedding_depth)
        # the third row is the paper's unknown preference; it keeps the published parameter count
        self.preference = nn.Embedding(3, d)
        self.layers = nn.ModuleList(CrossAttentionLayer(settings) for _ in range(settings.layers))
        self.prediction = _mlp(d, hidden, 2, 2)
        self.acquisition_entry = nn.Linear(2 * d + 1, hidden)
        self.acquisition = _mlp(hidden, hidden, 1, 2)

    def embed_points(self, points: Tensor) -> Tensor:
        """Return target tokens ``[..., d]`` of points ``[...]`` in [-1, 1]."""
        tokens: Tensor = self.first(points[..., None])
        return tokens

    def embed_duels(self, duels: Tensor, preferred: Tensor) -> Tensor:
        """Return context tokens ``[..., d]`` of duels ``[..., 2]``.

        ``preferred`` ``[...]`` is 0 or 1, or in floating point a degree between them, whose
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
        """Return encoded targets ``[B, R, N, d]``: tokens ``[B, N, d]`` in R contexts each.

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
        """Return mean and standard deviation ``[...]`` of the utility at targets ``[..., d]``."""
        mean, spread = self.prediction(encoded).unbind(-1)
        return mean, F.softplus(spread)

    def score(self, encoded: Tensor, pairs: Tensor, budget_used: float | Tensor) -> Tensor:
        """Return acquisition scores ``[B, R, P]`` of pairs ``[B, P, 2]`` of ``[B, R, N, d]``.

        ``budget_used`` is t/T: the number of the duel to choose over the budget, of each context
        ``[R]`` or of all.
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
        hidden = hidden.view(functions, contexts, pairs.shape[1], entry.out_features)
        used = budget_used[:, None, None] if isinstance(budget_used, Tensor) else budget_used
        hidden = F.relu(hidden + (entry.bias + used * entry.weight[:, -1]))
        scores: Tensor = self.acquisition(hidden)[..., 0]
        return scores


def score_pairs(
    model: PabboModel,
    duels: Tensor,
    preferred: Tensor,
    points: Tensor,
    pairs: Tensor,
    budget_used: float,
) -> Tensor:
    """Return scores ``[P]`` of candidate pairs after the duels so far; larger is better.

    Args:
        model: a trained model.
        duels: ``[D, 2]`` points compared so far, in [-1, 1]; D may be 0.
        preferred: ``[D]`` 0 where the first point of the duel has won, 1 where the second has, or
            a degree between, in floating point.
        points: ``[N]`` candidate points in [-1, 1].
        pairs: ``[P, 2]`` int64, the candidate pairs as indices into ``points``.
        budget_used: t/T, the number of the duel to choose over the budget.

    """
    with torch.no_grad():
        context = model.embed_duels(duels, preferred)
        encoded = model(context[None, None], model.embed_points(points)[None])
        return model.score(encoded, pairs[None], budget_used)[0, 0]


def restore_model(content: bytes) -> PabboModel:
    """Return the model of a file that a training wrote, on the CPU, ready for inference.

    Raises:
        ValueError: the file does not hold a PABBO model.

    """
    tensors, metadata = weights.parse_weights(content)
    if "model" not in metadata:
        raise ValueError("its metadata lack the key 'model'")
    model = PabboModel(PabboModelSettings.model_validate_json(metadata["model"]))
    model.load_state_dict(tensors)
    return model.eval()


def shipped_weights(stage: str) -> bytes:
    """Return the safetensors file of the model that ships for a stage, such as train_small.

    ``docs/pabbo.md`` has the model cards.
    """
    return resources.files(__package__).joinpath("weights", f"{stage}.safetensors").read_bytes()
