"""Tiny models, and the same in the library transformers with equal weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.summarization.model import T5, T5Settings

#: as T5 1.1 and mT5
GATED = T5Settings(
    vocabulary=23,
    width=12,
    head_width=5,
    heads=3,
    feed_forward=10,
    layers=2,
    decoder_layers=3,
    relative_buckets=8,
    relative_distance=12,
    gated=True,
    tied=False,
    dropout=0.0,
)
#: as T5
PLAIN = GATED.model_copy(update={"gated": False, "tied": True, "decoder_layers": None})
BOTH = pytest.mark.parametrize("settings", [GATED, PLAIN], ids=["gated-untied", "relu-tied"])


def lively(settings: T5Settings, seed: int = 0) -> T5:
    """In double precision, with weights so large that every part shows in the logits."""
    torch.manual_seed(seed)
    model = T5(settings).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.eval()


def batch(settings: T5Settings, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``[3, 14]`` padded at their end, at their start and not at all, mask, targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(2, settings.vocabulary, (3, 14), generator=generator)
    mask = torch.ones_like(inputs, dtype=torch.bool)
    mask[0, 9:] = False
    mask[1, :6] = False
    targets = torch.randint(2, settings.vocabulary, (3, 16), generator=generator)
    return inputs.where(mask, 0), mask, targets


def library_names(model: T5) -> dict[str, Tensor]:
    """The model's weights under the names that transformers has for them."""
    named: dict[str, Tensor] = {}
    state = model.state_dict()
    inner = model.settings.heads * model.settings.head_width
    hidden = model.settings.feed_forward

    def attention(ours: str, theirs: str) -> None:
        named[f"{theirs}.q.weight"] = state[f"{ours}.query.weight"]
        named[f"{theirs}.k.weight"] = state[f"{ours}.key_value.weight"][:inner]
        named[f"{theirs}.v.weight"] = state[f"{ours}.key_value.weight"][inner:]
        named[f"{theirs}.o.weight"] = state[f"{ours}.out.weight"]

    for stack, blocks in (("encoder", model.encoder), ("decoder", model.decoder)):
        named[f"{stack}.final_layer_norm.weight"] = state[f"{stack}_norm.weight"]
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        named[bias] = state[f"{stack}_bias.weight"]
        for n in range(len(blocks)):
            ours, theirs = f"{stack}.{n}", f"{stack}.block.{n}.layer"
            attention(f"{ours}.attention", f"{theirs}.0.SelfAttention")
            named[f"{theirs}.0.layer_norm.weight"] = state[f"{ours}.norm_attention.weight"]
            last = f"{theirs}.1"
            if stack == "decoder":
                attention(f"{ours}.cross_attention", f"{theirs}.1.EncDecAttention")
                norm = state[f"{ours}.norm_cross_attention.weight"]
                named[f"{theirs}.1.layer_norm.weight"] = norm
                last = f"{theirs}.2"
            named[f"{last}.layer_norm.weight"] = state[f"{ours}.norm_feed_forward.weight"]
            up = state[f"{ours}.feed_forward.up.weight"]
            if model.settings.gated:
                named[f"{last}.DenseReluDense.wi_0.weight"] = up[:hidden]
                named[f"{last}.DenseReluDense.wi_1.weight"] = up[hidden:]
            else:
                named[f"{last}.DenseReluDense.wi.weight"] = up
            named[f"{last}.DenseReluDense.wo.weight"] = state[f"{ours}.feed_forward.down.weight"]
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"):
        named[f"{name}.weight"] = state["embedding.weight"]
    named["lm_head.weight"] = state["embedding.weight" if model.head is None else "head.weight"]
    return named


def library_model(model: T5, family: str = "T5") -> Any:
    """The model as transformers has it, ``family`` T5 or MT5, in the model's precision."""
    transformers = pytest.importorskip("transformers")
    s = model.settings
    config = getattr(transformers, f"{family}Config")(
        vocab_size=s.vocabulary,
        d_model=s.width,
        d_kv=s.head_width,
        num_heads=s.heads,
        d_ff=s.feed_forward,
        num_layers=s.layers,
        num_decoder_layers=s.decoder_depth,
        relative_attention_num_buckets=s.relative_buckets,
        relative_attention_max_distance=s.relative_distance,
        feed_forward_proj="gated-gelu" if s.gated else "relu",
        tie_word_embeddings=s.tied,
        dropout_rate=s.dropout,
        decoder_start_token_id=0,
    )
    reference = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    reference = reference.to(model.embedding.weight.dtype)
    if not s.tied:  # some versions tie them all
        reference.lm_head.weight = nn.Parameter(reference.lm_head.weight.detach().clone())
    reference.load_state_dict(library_names(model), strict=True)
    return reference.eval()


def double(reference: Any) -> Any:
    """A model of transformers in double precision, the statistics of its norms too."""
    for module in reference.double().modules():
        if type(module).__name__.endswith("LayerNorm"):
            module.forward = partial(_norm, module)
    return reference


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))
