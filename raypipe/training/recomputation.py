"""Gradient checkpointing: recompute the activations of blocks in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_ATEN = torch.ops.aten
#: operations whose results are kept: products with weights, convolutions and fused attention.
#: Batched products are not among them: in attention that is not fused, their results are the
#: largest tensors.
_KEPT_OPERATIONS = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_mm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)


def recompute_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], what: Literal["all", "cheap"]
) -> list[nn.Module]:
    """Replace the blocks of a model by ones that recompute; return these (Chen et al. 2016).

    ``cheap`` is selective activation checkpointing: the results of the operations that take most of
    the time are kept. Torch raises RuntimeError in the backward pass if the model changes such a
    result in place.
    """
    options: dict[str, Any] = {}
    if what == "cheap":
        options["context_fn"] = partial(
            create_selective_checkpoint_contexts, list(_KEPT_OPERATIONS)
        )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, **options),
        check_fn=set(blocks).__contains__,
    )
    return [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
