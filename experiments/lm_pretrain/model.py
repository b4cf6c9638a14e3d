"""A decoder-only transformer: tokens in, logits of each next token out.

Each block is normalized before it, and the output once more (Radford et al. 2019, Language models
are unsupervised multitask learners, section 2.3), by RMSNorm (Zhang, Sennrich 2019). Positions are
rotary (Su et al. 2021, RoFormer). There are no biases, as in PaLM (Chowdhery et al. 2022, section
2). The feed-forward block is SwiGLU (Shazeer 2020, GLU variants improve transformer), or two
matrices with GELU between them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from raypipe import Settings

_INITIAL_STD = 0.02
NORM_EPSILON = 1e-5
#: base of the rotary wavelengths; the longest is about 2 pi times the base
ROPE_BASE = 10_000.0


class LmSettings(Settings):
    """Size and parts of the transformer; the defaults are the size `tiny`."""

    vocabulary: PositiveInt = 256
    """Number of different tokens."""
    width: PositiveInt = 128
    """Width of a token's representation (d_model)."""
    heads: PositiveInt = 4
    """Attention heads per layer; divides `width`."""
    layers: PositiveInt = 4
    """Decoder layers."""
    feed_forward: PositiveInt = 384
    """Hidden width of the feed-forward block."""
    context: PositiveInt = 64
    """Length of a sequence, in tokens."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of embeddings, attention weights and block outputs."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward block: SwiGLU with three matrices, or GELU with two."""
    tied: bool = False
    """Whether the output matrix is the embedding (weight tying)."""

    @model_validator(mode="after")
    def _heads_fit(self) -> LmSettings:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} must divide width={self.width}")
        if self.head_width % 2:
            raise ValueError(
                f"width={self.width} over heads={self.heads} is {self.head_width} per head; "
                "rotary positions turn pairs and need an even number: change one of them"
            )
        return self

    @property
    def head_width(self) -> int:
        """Width of a query, a key or a value of one head."""
        return self.width // self.heads


def tiny() -> LmSettings:
    """Return a size of about 0.92 M parameters: bytes as tokens, for a CPU."""
    return LmSettings()


def medium() -> LmSettings:
    """Return a size of about 75 M parameters; 52 M with ``mlp="gelu"`` and ``tied=True``."""
    return LmSettings(
        vocabulary=20_000,
        width=512,
        heads=16,
        layers=16,
        feed_forward=1536,
        context=2048,
        dropout=0.1,
    )


def large() -> LmSettings:
    """Return a size of about 757 M parameters."""
    return LmSettings(
        vocabulary=50_000,
        width=1280,
        heads=20,
        layers=24,
        feed_forward=5120,
        context=2048,
        dropout=0.1,
    )


def flops_per_token(settings: LmSettings) -> int:
    """Return the model FLOPs of a token, forward and backward pass, at the full context.

    They are counted as in PaLM (Chowdhery et al. 2022, appendix B): ``6 N + 12 layers width
    context``. ``N`` is the number of weights that a token is multiplied by: the matrices of the
    layers and the output matrix (also if it is tied), not the embeddings, which are looked up. The
    second term is attention over the whole square, although half of it is masked. A multiply-add
    is two operations, and a backward pass costs two forward passes; normalization, activations,
    rotation, softmax and loss are left out.
    """
    s = settings
    matrices = 3 if s.mlp == "swiglu" else 2
    layer = 4 * s.width**2 + matrices * s.width * s.feed_forward
    weights = s.layers * layer + s.vocabulary * s.width
    return 6 * weights + 12 * s.layers * s.width * s.context


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines ``[context, 1, 1, e]`` of RoFormer's angles (3.2.2).

    Position ``p`` turns the pair (i, i + e/2) of a head's numbers by ``p ROPE_BASE^(-2i/e)``.
    """
    frequencies = ROPE_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)[:, None, None]
    cosine = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sine = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return cosine.float(), sine.float()


def rotate(tokens: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return queries or keys ``[B, L, K, H, e]``, turned by :func:`rotary_tables` of length ``L``.

    The tables decide the arithmetic: half-precision tokens are turned in single precision.
    """
    turned = tokens * cosine + tokens.roll(tokens.shape[-1] // 2, -1) * sine
    return turned.to(tokens.dtype)


class Attention(nn.Module):
    """Causal self-attention of all heads, with one projection to queries, keys and values."""

    # per layer, because the tables must stay in single precision: sharded mixed precision would
    # cast an argument of the layer
    cosine: Tensor
    sine: Tensor

    def __init__(self, settings: LmSettings) -> None:
        super().__init__()
        s = settings
        self.heads = s.heads
        self.dropout = s.dropout
        self.query_key_value = nn.Linear(s.width, 3 * s.width, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)
        cosine, sine = rotary_tables(s.context, s.head_width)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return for each token ``[B, L, d]`` what it attends to: itself and earlier tokens."""
        length = tokens.shape[1]
        heads = self.query_key_value(tokens).unflatten(-1, (3, self.heads, -1))
        query_key, value = heads.split((2, 1), dim=2)
        query, key = rotate(query_key, self.cosine[:length], self.sine[:length]).unbind(2)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            # a view would keep the queries and keys before the rotation for the backward pass
            value.squeeze(2).contiguous().transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        output: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """``down(silu(gate x) * up x)``, gate and up in one matrix, or ``down(gelu(up x))``."""

    def __init__(self, settings: LmSettings) -> None:
        super().__init__()
        self.gated = settings.mlp == "swiglu"
        hidden = settings.feed_forward
        self.up = nn.Linear(settings.width, 2 * hidden if self.gated else hidden, bias=False)
        self.down = nn.Linear(hidden, settings.width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the block's output for each of the tokens ``[B, L, d]``."""
        hidden = self.up(tokens)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.gelu(hidden)
        output: Tensor = self.down(hidden)
        return output


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each on normalized tokens, with residual sums."""

    def __init__(self, settings: LmSettings) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(settings.width, eps=NORM_EPSILON)
        self.attention = Attention(settings)
        self.norm_feed_forward = nn.RMSNorm(settings.width, eps=NORM_EPSILON)
        self.feed_forward = FeedForward(settings)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens ``[B, L, d]`` after the layer."""
        tokens = tokens + self.dropout(self.attention(self.norm_attention(tokens)))
        output: Tensor = tokens + self.dropout(self.feed_forward(self.norm_feed_forward(tokens)))
        return output


class LanguageModel(nn.Module):
    """The transformer; with ``tied``, the embedding is the output matrix, too."""

    def __init__(self, settings: LmSettings) -> None:
        super().__init__()
        s = settings
        self.settings = s
        self.context = s.context
        self.embedding = nn.Embedding(s.vocabulary, s.width)
        self.dropout = nn.Dropout(s.dropout)
        self.layers = nn.ModuleList(DecoderLayer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width, eps=NORM_EPSILON)
        self.head = None if s.tied else nn.Linear(s.width, s.vocabulary, bias=False)
        self._initialize()

    @property
    def output(self) -> Tensor:
        """The output matrix, ``[V, d]``."""
        return (self.embedding if self.head is None else self.head).weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, L, V]`` of the token after each of the tokens, int64 ``[B, L]``.

        Raises:
            ValueError: there are more tokens than the context.

        """
        return F.linear(self.states(tokens), self.output)

    def states(self, tokens: Tensor) -> Tensor:
        """Return the states ``[B, L, d]`` whose products with ``output`` are the logits.

        Raises:
            ValueError: there are more tokens than the context.

        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"a sequence of {length} tokens exceeds the model's context={self.context}"
            )
        hidden = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            hidden = layer(hidden)
        states: Tensor = self.norm(hidden)
        return states

    def _initialize(self) -> None:
        """Initialize as GPT-2 (Radford et al. 2019, section 2.3, and its code): std 0.02.

        The matrices that write to the residual stream, two per layer, are divided by the root of
        their number, so that its variance does not grow with the depth.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
        residual = _INITIAL_STD / math.sqrt(2 * len(self.layers))
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                nn.init.normal_(module.attention.out.weight, std=residual)
                nn.init.normal_(module.feed_forward.down.weight, std=residual)
