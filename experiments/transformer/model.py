"""Transformer encoder for classification and regression of table rows and sequences.

A row becomes tokens as in FT-Transformer (Gorishniy et al. 2021, Revisiting deep learning models
for tabular data, section 3.3), a sequence as in BERT (Devlin et al. 2019, section 3). A [CLS] token
comes first; its state after the last layer gives the outputs. Normalization comes before each
block (Xiong et al. 2020, On layer normalization in the transformer architecture, section 3.1).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from raypipe.config.settings import Settings

PADDING = 0
_HEAD_WIDTH = 64


class EncoderSettings(Settings):
    """The size of the transformer, whatever its input."""

    length: PositiveInt = Field(128, description="Longest sequence in tokens; longer ones are cut.")
    hidden: PositiveInt = Field(256, description="Width of the hidden states.")
    layers: PositiveInt = Field(3, description="Number of encoder layers.")
    heads: PositiveInt | None = Field(
        None, description="Number of attention heads; by default one per 64 of the width."
    )
    feed_forward: PositiveInt | None = Field(
        None, description="Hidden width of the feed-forward block; by default 4 x hidden."
    )
    dropout: float = Field(
        0.1, ge=0, lt=1, description="Dropout rate of attention weights and block outputs."
    )

    @model_validator(mode="after")
    def _whole_heads(self) -> Self:
        if self.hidden % self.head_count:
            raise ValueError(f"heads={self.heads} must divide hidden={self.hidden}")
        return self

    @property
    def head_count(self) -> int:
        """The attention heads: those given, or as many of width 64 or above as divide the width."""
        if self.heads is not None:
            return self.heads
        most = max(1, self.hidden // _HEAD_WIDTH)
        return next(heads for heads in range(most, 0, -1) if self.hidden % heads == 0)

    @property
    def feed_forward_width(self) -> int:
        """The hidden width of the feed-forward block."""
        return self.feed_forward or 4 * self.hidden


class TransformerSettings(EncoderSettings):
    """The input, the size and the output of the transformer.

    Its input is sequences (``vocabulary``, ``length``) or tables (``numeric``, ``categories``).
    """

    vocabulary: int = Field(
        0, ge=0, description="number of token ids, the padding 0 among them; 0: tables"
    )
    numeric: int = Field(0, ge=0, description="numeric features of a table")
    categories: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        (), description="number of values of each categorical feature of a table"
    )
    kind: Literal["classification", "regression"] = Field(
        "classification", description="what the outputs are"
    )
    outputs: PositiveInt = Field(2, description="number of classes, or 1 for a regression")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        table = self.numeric + len(self.categories)
        if bool(self.vocabulary) == bool(table):
            raise ValueError(
                "give either vocabulary (the input is sequences) or numeric and categories "
                f"(tables): vocabulary={self.vocabulary}, and there are {table} features"
            )
        if self.vocabulary == 1:
            raise ValueError("vocabulary=1 is the padding alone; it has to count the tokens too")
        if (self.outputs == 1) != (self.kind == "regression"):
            raise ValueError(
                f"outputs={self.outputs} does not fit kind={self.kind}: a regression has 1 output, "
                "a classification one for each of at least 2 classes"
            )
        return self

    @property
    def tokens(self) -> int:
        """Tokens of a sample in the encoder: the [CLS] token, and the longest sequence or a row."""
        return 1 + (self.length if self.vocabulary else self.numeric + len(self.categories))


def flops_per_sample(settings: TransformerSettings) -> int:
    """Floating-point operations of a sample's forward and backward, at the full length.

    Counted are the products of matrices, a multiply-add as two operations, a backward as two
    forwards. The last layer has one query, the [CLS] token, and feeds it alone forward.
    """
    s = settings
    forward = 2 * s.hidden * s.outputs
    for queries in (*[s.tokens] * (s.layers - 1), 1):
        projections = 2 * queries * s.hidden + 2 * s.tokens * s.hidden
        attention = 2 * queries * s.tokens
        feed_forward = 2 * queries * s.feed_forward_width
        forward += 2 * s.hidden * (projections + attention + feed_forward)
    return 3 * forward


class TableInput(nn.Module):
    """A row as a token a feature: a numeric one scales a vector, a category is looked up."""

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
        """Tokens ``[B, n + c, d]`` of features ``[B, n]`` and int64 ``[B, c]``; n or c may be 0."""
        tokens = []
        if self.numeric:
            tokens.append(numeric[..., None] * self.scale + self.bias)
        if self.embedding is not None:
            tokens.append(self.embedding(categories + self.offsets))
        return torch.cat(tokens, dim=1), None


class SequenceInput(nn.Module):
    """A sequence as the sum of the embeddings of its tokens and of their positions."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        s = settings
        self.embedding = nn.Embedding(s.vocabulary, s.hidden, padding_idx=PADDING)
        self.positions = nn.Parameter(_uniform(torch.empty(s.length, s.hidden)))
        _uniform(self.embedding.weight)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, L, d]`` of ids ``[B, L]``, int64, and where they are no padding ``[B, L]``.

        Raises:
            ValueError: a sequence longer than ``length``.

        """
        length, most = ids.shape[1], self.positions.shape[0]
        if length > most:
            raise ValueError(f"{length} tokens a sequence, but the model has length={most}")
        return self.embedding(ids) + self.positions[:length], ids != PADDING


class EncoderLayer(nn.Module):
    """Attention, then the feed-forward block, each of normalised tokens and added to them."""

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
        """Tokens ``[B, S, d]`` one layer on, or the first ``queries`` of them.

        ``mask``, bool ``[B, 1, 1, S]``, is true where a token is attended to.
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


class Transformer(nn.Module):
    """The encoder between the input and the outputs."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        s = settings
        self.input = SequenceInput(s) if s.vocabulary else TableInput(s)
        self.cls = nn.Parameter(_uniform(torch.empty(1, s.hidden)))
        self.layers = nn.ModuleList(EncoderLayer(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.hidden)
        self.head = nn.Linear(s.hidden, s.outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Outputs ``[B, K]`` of what the input takes: ``ids``, or ``numeric, categories``."""
        tokens, real = self.input(*inputs)
        tokens = torch.cat((self.cls.expand(len(tokens), 1, -1), tokens), dim=1)
        mask = None if real is None else F.pad(real, (1, 0), value=True)[:, None, None]
        for layer in self.layers[:-1]:
            tokens = layer(tokens, mask)
        # nothing reads the others after the last layer
        outputs: Tensor = self.head(self.norm(self.layers[-1](tokens, mask, 1)[:, 0]))
        return outputs


def _uniform(weights: Tensor) -> Tensor:
    """Filled in place with draws from [-1, 1] / sqrt(d), as FT-Transformer's tokens."""
    bound = weights.shape[-1] ** -0.5
    return nn.init.uniform_(weights, -bound, bound)
