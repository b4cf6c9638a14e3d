"""T5 and mT5: their sizes, and the models that ``transformers`` builds from them.

Raffel et al. 2020, Exploring the limits of transfer learning with a unified text-to-text
transformer (section 2.1); with a gated feed-forward block and a separate output matrix T5 1.1
(Shazeer 2020, GLU variants improve transformer) and mT5 (Xue et al. 2021, section 3).

``transformers`` is imported where a model is built, never with this module: the driver and the
tasks that tokenize work without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveInt, model_validator

from experiments.common.pretrained import require_libraries
from raypipe import Settings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import T5ForConditionalGeneration

#: the token that fills a batch, and that the decoder starts from
PAD = 0
#: the token that ends a text
END = 1
NORM_EPSILON = 1e-6
#: the settings and their names in ``transformers``
SIZE_KEYS = {
    "vocabulary": "vocab_size",
    "width": "d_model",
    "head_width": "d_kv",
    "heads": "num_heads",
    "feed_forward": "d_ff",
    "layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
    "dropout": "dropout_rate",
}
#: the feed-forward blocks in ``transformers``, and whether they are gated
ACTIVATIONS = {"relu": False, "gated-gelu": True}
SPECIAL_TOKENS = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}


class T5Settings(Settings):
    """The size and the parts of a T5; the defaults are the small one."""

    vocabulary: int = Field(4096, ge=2)
    """Size of the vocabulary, padding and end token included."""
    width: PositiveInt = 128
    """Width of the hidden states (d_model)."""
    head_width: PositiveInt = 32
    """Width of the queries and keys of a head (d_kv)."""
    heads: PositiveInt = 4
    """Attention heads; heads x head_width may differ from width."""
    feed_forward: PositiveInt = 384
    """Hidden width of the feed-forward blocks (d_ff)."""
    layers: PositiveInt = 2
    """Number of encoder layers."""
    decoder_layers: PositiveInt | None = None
    """Number of decoder layers; by default the number of encoder layers."""
    relative_buckets: int = Field(32, ge=4, multiple_of=2)
    """Number of buckets of relative positions, each with a bias."""
    relative_distance: PositiveInt = 128
    """Distance in tokens from which all relative positions share a bucket."""
    gated: bool = True
    """Whether feed-forward blocks are gated GELU (T5 1.1, mT5), not ReLU (T5)."""
    tied: bool = True
    """Whether the output matrix is the scaled embedding (T5; not T5 1.1, mT5)."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout rate of embeddings, attention weights, hidden states and outputs."""

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
    normalization, activations, position biases, softmax and loss are left out.
    """
    s, source, target = settings, source_length, target_length
    inner = s.heads * s.head_width
    feed_forward = (3 if s.gated else 2) * s.width * s.feed_forward
    encoder = source * (4 * s.width * inner + feed_forward + 2 * source * inner)
    own = target * (4 * s.width * inner + feed_forward + 2 * target * inner)
    cross = 2 * (source + target) * s.width * inner + 2 * source * target * inner
    output = target * s.width * s.vocabulary
    return 6 * (s.layers * encoder + s.decoder_depth * (own + cross) + output)


def library_config(settings: T5Settings) -> dict[str, Any]:
    """Return the settings under the names that ``transformers.T5Config`` has for them."""
    return {
        **{theirs: getattr(settings, ours) for ours, theirs in SIZE_KEYS.items()},
        "num_decoder_layers": settings.decoder_depth,
        **SPECIAL_TOKENS,
        "feed_forward_proj": next(k for k, gated in ACTIVATIONS.items() if gated == settings.gated),
        "tie_word_embeddings": settings.tied,
        "layer_norm_epsilon": NORM_EPSILON,
    }


def build_model(settings: T5Settings) -> T5ForConditionalGeneration:
    """Build a T5 of these sizes with random weights.

    Raises:
        ConfigError: ``transformers`` is not installed.

    """
    require_libraries("summarization", "transformers")
    import torch
    from torch import nn
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(**library_config(settings)))
    if not settings.tied:
        # separate from the embedding, which transformers 5 ties to it; the states are not scaled,
        # so that the logits start around 1 in this way only
        output = nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.lm_head.weight = nn.init.normal_(output, std=settings.width**-0.5)
    return store_shared_weights_once(model)


def separate_output(model: T5ForConditionalGeneration) -> None:
    """Separate the output matrix from the embedding, as in T5 1.1 and mT5.

    ``transformers`` 5 ties the two in every T5 that is not loaded from a file with both.
    """
    from torch import nn

    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def store_shared_weights_once(model: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """Leave further names of a weight out of the model's state; the model itself.

    Encoder, decoder and a tied output share the embedding. Checkpoints would hold it four times.
    """
    first = {parameter: name for name, parameter in model.named_parameters()}
    aliases = {
        name: first[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != first[parameter]
    }

    def drop(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for alias in aliases:
            state.pop(prefix + alias, None)

    def restore(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        for alias, name in aliases.items():
            if prefix + name in state:
                state.setdefault(prefix + alias, state[prefix + name])

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_pre_hook(restore)
    return model


def next_token_states(
    model: T5ForConditionalGeneration, inputs: Tensor, mask: Tensor, decoder_inputs: Tensor
) -> Tensor:
    """Return states ``[B, T, d]``, whose products with ``lm_head.weight`` are the logits.

    The logits are of the token after each of ``decoder_inputs``, int64 ``[B, T]``: the summary
    after a :data:`PAD`; what pads it at its end changes no logit before it. ``inputs``, int64
    ``[B, S]``, are read where ``mask``, bool ``[B, S]``, is true.
    """
    source = model.encoder(input_ids=inputs, attention_mask=mask).last_hidden_state
    states: Tensor = model.decoder(
        input_ids=decoder_inputs,
        encoder_hidden_states=source,
        encoder_attention_mask=mask,
        use_cache=False,
    ).last_hidden_state
    config = model.config  # transformers before 5 scales the states of every tied model
    if getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
        states = states * model.model_dim**-0.5
    return states
