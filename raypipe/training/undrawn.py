"""Models built without drawing their weights, which another worker draws."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# fill a tensor with random numbers
_DRAWS = (
    *(torch.Tensor.normal_, torch.Tensor.uniform_),
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_),
)
# depend on the form of a tensor, not on its values; some are attributes
_FORM = frozenset(
    [
        *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_meta", "is_leaf"),
        *("size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "__hash__"),
        *(
            "empty_like",
            "zeros_like",
            "ones_like",
            "new_empty",
            "new_zeros",
            "new_ones",
            "new_full",
        ),
        *("new_tensor", "grad_fn"),
    ]
)


class Undrawn(TorchFunctionMode):
    """While open, parameters are not filled with random numbers.

    ``were_used`` is whether something else was computed from them, such as a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.were_used = False
        self._undrawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = args[0] if args else given.get("tensor")
        if func in _DRAWS and isinstance(first, nn.Parameter):
            self._undrawn.append(first)
            return first
        inputs = [each for each in (*args, *given.values()) if isinstance(each, nn.Parameter)]
        if _only_writes(func):
            inputs = [each for each in inputs if each is not first]
        if not _is_about_form(func):
            self.were_used |= any(each is other for each in inputs for other in self._undrawn)
        return func(*args, **given)


def _only_writes(func: Any) -> bool:
    """Whether a function changes its first argument in place."""
    return bool(re.search("[^_]_$", func.__name__))


def _is_about_form(func: Any) -> bool:
    """Whether a function depends on the form of its arguments, not on their values."""
    attribute = getattr(func, "__self__", None)  # of a tensor's attribute, func is its __get__
    return func.__name__ in _FORM or getattr(attribute, "__name__", None) in _FORM
