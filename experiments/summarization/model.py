"""T5: an encoder reads the text, a decoder writes the summary a token at a time.

Raffel et al. 2020, Exploring the limits of transfer learning with a unified text-to-text
transformer (section 2.1), and with a gated feed-forward block and its own output matrix T5 1.1
(Shazeer 2020, GLU variants improve transformer) and mT5 (Xue et al. 2021, section 3). Positions
are known by a bias of the attention that depends on the distance alone; one table of it serves all
layers of a stack. Nothing else has a bias, normalisation is RMSNorm (Zhang, Sennrich 2019) and
comes before each block, and the products of queries and keys are not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from raypipe.config.settings import Settings

#: the token that fills a batch, and that the decoder starts from
PAD = 0
#: the token that ends a text
END = 1
NORM_EPSILON = 1e-6


class T5Settings(Settings):
    """The size and the parts of a T5; the defaults are the small one."""

    vocabulary: int = Field(4096, ge=2, description="different tokens, padding and end counted")
    width: PositiveInt = Field(128, description="width of a token, d_model")
    head_width: PositiveInt = Field(32, description="width of a head's queries and keys, d_kv")
    heads: PositiveInt = Field(4, description="attention heads; heads x head_width is free")
    feed_forward: PositiveInt = Field(384, description="hidden width of feed-forward blocks, d_ff")
    layers: PositiveInt = Field(2, description="encoder layers")
    decoder_layers: PositiveInt | None = Field(
        None, description="decoder layers; by default as many as encoder layers"
    )
    relative_buckets: int = Field(
        32, ge=4, multiple_of=2, description="classes of distances that have a bias of their own"
    )
    relative_distance: PositiveInt = Field(
        128, description="all distances from this one on are one class, in tokens"
    )
    gated: bool = Field(
        True, description="gated-GELU feed-forward of T5 1.1 and mT5, not the ReLU of T5"
    )
    tied: bool = Field(
        True, description="the output is the embedding, scaled, as in T5; not in T5 1.1 and mT5"
    )
    dropout: float = Field(
        0.1, ge=0, lt=1, description="of embeddings, attention weights, hidden and output values"
    )

    @model_validator(mode="after")
    def _distances_fit(self) -> T5Settings:
        if self.relative_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_distance={self.relative_distance} must be more than half of "
                f"relative_buckets={self.relative_buckets}: that many distances have one each"
            )
        return self

    @property
    def decoder_depth(self) -> int:
        """The decoder layers: those given, or as many as encoder layers."""
        return self.decoder_layers or self.layers


def small() -> T5Settings:
    """About 1.5 M parameters, for a CPU."""
    return T5Settings()


def t5_220m() -> T5Settings:
    """T5-base, 223 M parameters."""
    return T5Settings(
        vocabulary=32_128,
        width=768,
        head_width=64,
        heads=12,
        feed_forward=3072,
        layers=12,
        gated=False,
    )


def mt5_1_2b() -> T5Settings:
    """mT5-large, 1.23 G parameters, 0.51 G of them in the embedding and the output."""
    return T5Settings(
        vocabulary=250_112,
        width=1024,
        head_width=64,
        heads=16,
        feed_forward=2816,
        layers=24,
        tied=False,
    )


def flops_per_sample(settings: T5Settings, source_length: int, target_length: int) -> int:
    """Floating-point operations of a pair's forward and backward.

    Model FLOPs counted as in PaLM (Chowdhery et al. 2022, appendix B), of the parts of T5: each
    token by the matrices it is multiplied by, the keys and values of the cross-attention by the
    source's, and the queries by the keys and the weights by the values over the whole rectangle,
    causal or not. A multiply-add is two operations, a backward costs two forwards; embeddings,
    normalisation, activations, position biases, softmax and loss are left out.
    """
    s, source, target = settings, source_length, target_length
    inner = s.heads * s.head_width
    feed_forward = (3 if s.gated else 2) * s.width * s.feed_forward
    encoder = source * (4 * s.width * inner + feed_forward + 2 * source * inner)
    own = target * (4 * s.width * inner + feed_forward + 2 * target * inner)
    cross = 2 * (source + target) * s.width * inner + 2 * source * target * inner
    output = target * s.width * s.vocabulary
    return 6 * (s.layers * encoder + s.decoder_depth * (own + cross) + output)


def relative_buckets(distances: Tensor, buckets: int, furthest: int, *, causal: bool) -> Tensor:
    """The class, int64 in [0, buckets), of each distance key - query, int64 of any shape.

    Half of the classes are one distance each, the others are logarithmically wider, up to
    ``furthest`` and beyond (Raffel et al. 2020, section 2.1). A decoder sees no key after its query
    and has them all for those before; an encoder halves them between before and after.
    """
    if causal:
        offset, distances = torch.zeros_like(distances), (-distances).clamp(min=0)
    else:
        buckets //= 2
        offset, distances = (distances > 0) * buckets, distances.abs()
    exact = buckets // 2
    # in single precision, as the reference implementation: at the edges of classes it matters
    share = torch.log(distances.clamp(min=1).float() / exact) / math.log(furthest / exact)
    wide = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distances < exact, distances, wide)


class RelativeBias(nn.Module):
    """What is added to the products of queries and keys, by their distance and the head.

    It belongs to a stack, not to a layer: the layers are handed the biases.
    """

    def __init__(self, settings: T5Settings, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.furthest = settings.relative_distance
        self.weight = nn.Parameter(torch.empty(settings.relative_buckets, settings.heads))

    def forward(self, queries: int, keys: int) -> Tensor:
        """Biases ``[1, H, queries, keys]``; the queries are the last of the keys' positions."""
        distances = torch.arange(1 - keys, queries + 1, device=self.weight.device)
        classes = relative_buckets(distances, len(self.weight), self.furthest, causal=self.causal)
        # looked up once a distance, not once a pair: of equal rows, read as rows of one number
        # less, each begins one distance further back
        row = self.weight[classes].T.roll(1 - queries, dims=1)[:, None]
        rows = row.expand(-1, queries, -1).flatten(1)[:, : queries * (queries + keys - 1)]
        square: Tensor = rows.unflatten(1, (queries, -1))[None, ..., :keys]
        return square


@dataclass
class LayerCache:
    """What a decoder layer remembers of ``N`` unfinished texts of ``B`` sources, ``N / B`` of each.

    ``own`` are keys and values ``[N, H, t, e]`` of the texts so far, ``source`` those of the
    sources, ``[B, H, S, e]``.
    """

    own: tuple[Tensor, Tensor] | None = None
    source: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """How many tokens of each text are in it."""
        return 0 if self.own is None else self.own[0].shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the tokens so far with those of the new ones."""
        if self.own is not None:
            keys = torch.cat((self.own[0], keys), dim=2)
            values = torch.cat((self.own[1], values), dim=2)
        self.own = keys, values
        return self.own

    def select(self, texts: Tensor, sources: Tensor | None = None) -> None:
        """Keep these texts, int64 ``[n]``, in this order, and these sources; by default all."""
        if self.own is not None:
            self.own = self.own[0][texts], self.own[1][texts]
        if self.source is not None and sources is not None:
            self.source = self.source[0][sources], self.source[1][sources]


class Attention(nn.Module):
    """Attention of all heads: queries of some tokens, keys and values of the same or of others."""

    def __init__(self, settings: T5Settings) -> None:
        super().__init__()
        s = settings
        self.heads = s.heads
        self.dropout = nn.Dropout(s.dropout)
        self.query = nn.Linear(s.width, s.heads * s.head_width, bias=False)
        self.key_value = nn.Linear(s.width, 2 * s.heads * s.head_width, bias=False)
        self.out = nn.Linear(s.heads * s.head_width, s.width, bias=False)

    def keys_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, S, e]`` of tokens ``[B, S, d]``."""
        keys, values = self.key_value(tokens).chunk(2, dim=-1)
        return self._by_head(keys), self._by_head(values)

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """What each of the tokens ``[B, T, d]`` gathers from the values ``[B, H, S, e]``.

        ``bias``, that broadcasts to ``[B, H, T, S]``, is added to the products, or is bool and
        true where a token is attended to.
        """
        dropout = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            self._by_head(self.query(tokens)), keys, values, bias, dropout, scale=1.0
        )
        output: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return output

    def _by_head(self, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """``down(gelu(gate x) * up x)``, gate and up in one matrix, or ``down(relu(up x))``."""

    def __init__(self, settings: T5Settings) -> None:
        super().__init__()
        self.gated = settings.gated
        hidden = settings.feed_forward
        self.up = nn.Linear(settings.width, 2 * hidden if self.gated else hidden, bias=False)
        self.down = nn.Linear(hidden, settings.width, bias=False)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, L, d]``, each by itself."""
        hidden = self.up(tokens)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.gelu(gate, approximate="tanh") * hidden
        else:
            hidden = F.relu(hidden)
        output: Tensor = self.dropout(self.down(self.dropout(hidden)))
        return output


class EncoderLayer(nn.Module):
    """Attention, then the feed-forward block, each of normalised tokens and added to them."""

    def __init__(self, settings: T5Settings) -> None:
        super().__init__()
        self.norm_attention = _norm(settings)
        self.attention = Attention(settings)
        self.norm_feed_forward = _norm(settings)
        self.feed_forward = FeedForward(settings)

    def forward(self, tokens: Tensor, bias: Tensor) -> Tensor:
        """Tokens ``[B, S, d]`` one layer on; ``bias`` as :class:`Attention` takes it."""
        normed = self.norm_attention(tokens)
        tokens = tokens + self.attention(normed, *self.attention.keys_values(normed), bias)
        output: Tensor = tokens + self.feed_forward(self.norm_feed_forward(tokens))
        return output


class DecoderLayer(nn.Module):
    """As an encoder layer, and between its blocks attention to what the encoder read."""

    def __init__(self, settings: T5Settings) -> None:
        super().__init__()
        self.norm_attention = _norm(settings)
        self.attention = Attention(settings)
        self.norm_cross_attention = _norm(settings)
        self.cross_attention = Attention(settings)
        self.norm_feed_forward = _norm(settings)
        self.feed_forward = FeedForward(settings)

    def forward(
        self,
        tokens: Tensor,
        bias: Tensor,
        states: Tensor,
        mask: Tensor,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Tokens ``[N, T, d]`` one layer on, which attend to states ``[B, S, d]`` of their sources.

        ``bias`` is that between the tokens, ``mask``, bool ``[B, 1, 1, S]``, is true where there
        is a source. With a cache the tokens follow those in it, and are added to it.
        """
        cache = cache or LayerCache()
        normed = self.norm_attention(tokens)
        own = cache.append(*self.attention.keys_values(normed))
        tokens = tokens + self.attention(normed, *own, bias)
        cache.source = cache.source or self.cross_attention.keys_values(states)
        # several texts of one source are as more tokens of one: no distance counts here
        normed = self.norm_cross_attention(tokens).view(len(states), -1, tokens.shape[-1])
        tokens = tokens + self.cross_attention(normed, *cache.source, mask).view_as(tokens)
        output: Tensor = tokens + self.feed_forward(self.norm_feed_forward(tokens))
        return output


class T5(nn.Module):
    """Encoder and decoder; with ``tied`` there is no output matrix beside the embedding."""

    def __init__(self, settings: T5Settings) -> None:
        super().__init__()
        s = settings
        self.settings = s
        self.embedding = nn.Embedding(s.vocabulary, s.width)
        self.dropout = nn.Dropout(s.dropout)
        self.encoder_bias = RelativeBias(s, causal=False)
        self.encoder = nn.ModuleList(EncoderLayer(s) for _ in range(s.layers))
        self.encoder_norm = _norm(s)
        self.decoder_bias = RelativeBias(s, causal=True)
        self.decoder = nn.ModuleList(DecoderLayer(s) for _ in range(s.decoder_depth))
        self.decoder_norm = _norm(s)
        self.head = None if s.tied else nn.Linear(s.width, s.vocabulary, bias=False)
        self._initialise()

    @property
    def blocks(self) -> Iterator[nn.Module]:
        """The layers of both stacks."""
        yield from self.encoder
        yield from self.decoder

    def forward(self, inputs: Tensor, mask: Tensor, decoder_inputs: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of the token after each of ``decoder_inputs``, int64 ``[B, T]``.

        These are the summary after a :data:`PAD`; what pads them at their end changes no logit
        before it. ``inputs``, int64 ``[B, S]``, are read where ``mask``, bool ``[B, S]``, is true.
        """
        return self.decode(decoder_inputs, self.encode(inputs, mask), mask)

    def encode(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """States ``[B, S, d]`` of the sources, of which those not in the mask mean nothing."""
        length = inputs.shape[1]
        bias = self._masked(self.encoder_bias(length, length), mask[:, None, None])
        hidden = self.dropout(self.embedding(inputs))
        for layer in self.encoder:
            hidden = layer(hidden, bias)
        states: Tensor = self.dropout(self.encoder_norm(hidden))
        return states

    def decode(
        self, tokens: Tensor, states: Tensor, mask: Tensor, cache: list[LayerCache] | None = None
    ) -> Tensor:
        """Logits ``[N, T, V]`` of the token after each of the tokens, int64 ``[N, T]``.

        ``states`` and ``mask`` are those of ``B`` sources, and ``N / B`` texts in a row belong to
        each. With a cache, a part for each decoder layer, at first empty, the tokens follow those
        in it, and are added to it; the keys and values of the sources are computed once.
        """
        new, before = tokens.shape[1], cache[0].length if cache else 0
        seen = torch.ones(new, before + new, dtype=torch.bool, device=tokens.device).tril(before)
        bias = self._masked(self.decoder_bias(new, before + new), seen)
        hidden = self.dropout(self.embedding(tokens))
        for n, layer in enumerate(self.decoder):
            hidden = layer(hidden, bias, states, mask[:, None, None], cache[n] if cache else None)
        hidden = self.dropout(self.decoder_norm(hidden))
        if self.head is None:
            return F.linear(hidden * self.settings.width**-0.5, self.embedding.weight)
        return F.linear(hidden, self.head.weight)

    def _masked(self, bias: Tensor, seen: Tensor) -> Tensor:
        """The bias in the precision of the attention, and no attention to what is not seen."""
        device = bias.device.type
        if torch.is_autocast_enabled(device):  # once, not in each layer
            bias = bias.to(torch.get_autocast_dtype(device))
        # not infinite: without any token there would be no number
        return bias.masked_fill(~seen, torch.finfo(bias.dtype).min)

    def _initialise(self) -> None:
        """As the reference implementation, the Transformer of Mesh TensorFlow.

        Weights are normal with the inverse root of what they sum over. The root of ``head_width``
        that the products are not divided by is in the queries' weights. The output matrix of its
        own is as any other, so that logits start around 1.
        """
        s = self.settings
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                summed = s.width * s.head_width if name.endswith("query") else module.in_features
                nn.init.normal_(module.weight, std=summed**-0.5)
            elif isinstance(module, RelativeBias):
                nn.init.normal_(module.weight, std=s.width**-0.5)


def _norm(settings: T5Settings) -> nn.RMSNorm:
    return nn.RMSNorm(settings.width, eps=NORM_EPSILON)
