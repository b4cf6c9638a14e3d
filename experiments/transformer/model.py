"""Transformer encoder for classification and regression of table rows and sequences.

A row becomes tokens as in FT-Transformer (Gorishniy et al. 2021, Revisiting deep learning models
for tabular data, section 3.3), a sequence as in BERT (Devlin et al. 2019, section 3). A [CLS] token
comes first; its state after the last layer gives the outputs. Normalization comes before each
block (Xiong et al. 2020, On layer normalization in the transformer architecture, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.transformer.settings import TransformerSettings

PADDING = 0


def flops_per_sample(settings: TransformerSettings) -> int:
    """Return the floating-point operations of a forward and backward pass at full length.

    These are matrix products, with a multiply-add as two operations and a backward pass as two
    forward passes. The last layer computes only the [CLS] token.
    """
    s = settings
    forward = 2 * (s.hidden + (s.ngrams.width if s.ngrams else 0)) * s.outputs
    for queries in (*[s.tokens] * (s.layers - 1), 1):
        projections = 2 * queries * s.hidden + 2 * s.tokens * s.hidden
        attention = 2 * queries * s.tokens
        feed_forward = 2 * queries * s.feed_forward_width
        forward += 2 * s.hidden * (projections + attention + feed_forward)
    return 3 * forward


class TableInput(nn.Module):
    """Encode a row as one token per feature: numbers scale a vector, categories are embedded."""

    offsets: Tensor

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        s = settings
        if s.numeric:
            self.scale = nn.Parameter(_uniform(torch.empty(s.numeric, s.hidden)))
            self.bias = nn.Parameter(_uniform(torch.empty(s.numeric, s.hidden)))
        self.numeric = s.numeric
        self.embedding = nn.Embedding(sum(s.categories), s.hidden) if s.categories else None
        if self.embedding is not None:
            _uniform(self.embedding.weight)
        sizes = torch.tensor((0, *s.categories[:-1]))
        self.register_buffer("offsets", sizes.cumsum(0), persistent=False)

    def forward(self, numeric: Tensor, categories: Tensor) -> tuple[Tensor, None]:
        """Return tokens ``[B, n + c, d]`` of numbers ``[B, n]`` and categories ``[B, c]``."""
        tokens = []
        if self.numeric:
            tokens.append(numeric[..., None] * self.scale + self.bias)
        if self.embedding is not None:
            tokens.append(self.embedding(categories + self.offsets))
        return torch.cat(tokens, dim=1), None


class SequenceInput(nn.Module):
    """Encode a sequence as the sums of token and position embeddings."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        s = settings
        self.embedding = nn.Embedding(s.vocabulary, s.hidden, padding_idx=PADDING)
        self.positions = nn.Parameter(_uniform(torch.empty(s.length, s.hidden)))
        _uniform(self.embedding.weight)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens ``[B, L, d]`` of ids, int64 ``[B, L]``, and a mask without padding.

        Raises:
            ValueError: a sequence is longer than ``length``.

        """
        length, most = ids.shape[1], self.positions.shape[0]
        if length > most:
            raise ValueError(f"a sequence has {length} tokens, but the model has length={most}")
        return self.embedding(ids) + self.positions[:length], ids != PADDING


class EncoderLayer(nn.Module):
    """Attention and feed-forward block, each with layer normalization and residual connection."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        d = settings.hidden
        self.heads = settings.head_count
        self.norm_attention = nn.LayerNorm(d)
        self.query = nn.Linear(d, d)
        self.key_value = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)
        self.norm_feed_forward = nn.LayerNorm(d)
        self.up = nn.Linear(d, settings.feed_forward_width)
        self.down = nn.Linear(settings.feed_forward_width, d)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None, queries: int | None = None) -> Tensor:
        """Return the new states of tokens ``[B, S, d]``, or of the first ``queries`` of them.

        ``mask``, bool ``[B, 1, 1, S]``, is true for tokens to attend to.
        """
        normed = self.norm_attention(tokens)
        heads = (self.query(normed[:, :queries]), *self.key_value(normed).chunk(2, dim=-1))
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in heads)
        dropout = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        tokens = tokens[:, :queries] + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        hidden = F.gelu(self.up(self.norm_feed_forward(tokens)))
        output: Tensor = tokens + self.dropout(self.down(hidden))
        return output


class NgramBranch(nn.Module):
    """A linear model of the weighted n-grams of a text, of low rank.

    It is that of Joulin et al. (2017, Bag of tricks for efficient text classification, section 2).
    Vectors are small and scaled by the root of their width, so that an optimizer like Adam moves
    them as fast as a linear model of rare features needs.
    """

    def __init__(self, width: int, most: int, outputs: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(1 + most, width))
        nn.init.normal_(self.vectors, std=1 / width)
        self.head = nn.Linear(width, outputs)

    def forward(self, ngrams: Tensor, weights: Tensor) -> Tensor:
        """Return outputs ``[B, K]`` of n-grams, int64 ``[B, M]``, 0 padding, and their weights."""
        scaled = weights.to(self.vectors.dtype) * self.vectors.shape[1] ** 0.5
        summed = F.embedding_bag(
            ngrams, self.vectors, mode="sum", per_sample_weights=scaled, padding_idx=PADDING
        )
        outputs: Tensor = self.head(summed)
        return outputs


class Transformer(nn.Module):
    """The encoder with its input and output layers, and with a branch on n-grams, if any."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        s = settings
        self.input = SequenceInput(s) if s.vocabulary else TableInput(s)
        self.cls = nn.Parameter(_uniform(torch.empty(1, s.hidden)))
        self.layers = nn.ModuleList(EncoderLayer(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.hidden)
        self.head = nn.Linear(s.hidden, s.outputs)
        self.settings = s
        self.ngrams: NgramBranch | None = None
        if s.ngrams is not None:
            self.ngrams = NgramBranch(s.ngrams.width, s.ngrams.most, s.outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return outputs ``[B, K]``: the weighted mean of those of the branches."""
        return combined(self.branches(*inputs), self.settings)

    def branches(self, *inputs: Tensor) -> list[Tensor]:
        """Return the outputs ``[B, K]`` of the encoder, and of the n-grams, if any.

        The inputs are ``ids`` or ``numeric, categories``, then ``ngrams, weights`` of the branch.
        """
        if self.ngrams is None:
            return [self._encoded(*inputs)]
        *own, ngrams, weights = inputs
        return [self._encoded(*own), self.ngrams(ngrams, weights)]

    def _encoded(self, *inputs: Tensor) -> Tensor:
        tokens, real = self.input(*inputs)
        tokens = torch.cat((self.cls.expand(len(tokens), 1, -1), tokens), dim=1)
        mask = None if real is None else F.pad(real, (1, 0), value=True)[:, None, None]
        for layer in self.layers[:-1]:
            tokens = layer(tokens, mask)
        # only the [CLS] token is read after the last layer
        outputs: Tensor = self.head(self.norm(self.layers[-1](tokens, mask, 1)[:, 0]))
        return outputs


def combined(branches: Sequence[Tensor], settings: TransformerSettings) -> Tensor:
    """Return the mean of the branches' outputs, in which the n-grams have their share as weight."""
    if settings.ngrams is None:
        return branches[0]
    encoded, linear = branches
    return (1 - settings.ngrams.share) * encoded + settings.ngrams.share * linear


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape; a single one is returned as it is."""
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).mean(0)


def _uniform(weights: Tensor) -> Tensor:
    """Initialize in place from [-1, 1] / sqrt(d), as FT-Transformer does."""
    bound = weights.shape[-1] ** -0.5
    return nn.init.uniform_(weights, -bound, bound)
