"""Tiny models whose every part shows in the logits, and batches for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.summarization.model import T5Settings, build_model, library_config
from tests.experiments.references import lively

transformers = pytest.importorskip("transformers", reason="needs the extra nlp")

#: as T5 1.1 and mT5
GATED = T5Settings(
    vocabulary=23, width=12, head_width=5, heads=3, feed_forward=10, layers=2, decoder_layers=3,
    relative_buckets=8, relative_distance=12, gated=True, tied=False, dropout=0.0,
)  # fmt: skip
#: as T5
PLAIN = GATED.model_copy(update={"gated": False, "tied": True, "decoder_layers": None})
BOTH = pytest.mark.parametrize("settings", [GATED, PLAIN], ids=["gated-untied", "relu-tied"])


def lively_t5(settings: T5Settings, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return lively(build_model(settings).eval(), 0.3)


def batch(settings: T5Settings, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``[3, 14]`` padded at their end, at their start and not at all, mask, targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(2, settings.vocabulary, (3, 14), generator=generator)
    mask = torch.ones_like(inputs, dtype=torch.bool)
    mask[0, 9:] = False
    mask[1, :6] = False
    targets = torch.randint(2, settings.vocabulary, (3, 16), generator=generator)
    return inputs.where(mask, 0), mask, targets


def next_token_logits(model: Any, inputs: Tensor, mask: Tensor, decoder_inputs: Tensor) -> Tensor:
    """Logits ``[B, T, V]`` of the token after each of ``decoder_inputs``, by the library."""
    logits: Tensor = model(
        input_ids=inputs, attention_mask=mask, decoder_input_ids=decoder_inputs, use_cache=False
    ).logits
    return logits


def library_model(model: Any, settings: T5Settings, family: str = "T5") -> Any:
    """The same weights in a model that ``transformers`` alone built, ``family`` T5 or MT5."""
    config = getattr(transformers, f"{family}Config")(**library_config(settings))
    reference = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    if not settings.tied:  # some versions tie them all
        weight = reference.lm_head.weight
        reference.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    reference.load_state_dict({name: value.detach() for name, value in parameters.items()})
    return reference.eval()
