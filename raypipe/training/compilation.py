"""Compilation by torch.compile: the blocks of a model, and the loss around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from raypipe.training.settings import CompileMode

_COMPILERS = ("torch._dynamo.", "torch._inductor.", "triton.compiler.")


def compiled(function: Callable[..., Any], mode: CompileMode) -> Callable[..., Any]:
    """Return the function, compiled when it is first called."""
    compiled: Callable[..., Any] = torch.compile(function, mode=mode)
    return compiled


def compile_blocks(blocks: Iterable[nn.Module], mode: CompileMode) -> None:
    """Compile each block by itself: equal blocks share one graph.

    The model as one graph takes several times as long to compile, and is hardly faster.
    """
    for block in blocks:
        block.forward = _boundary(compiled(block.forward, mode))


def is_compile_error(error: BaseException) -> bool:
    """Whether a compiler raised an error, not the code that it compiled."""
    names = [f"{kind.__module__}." for kind in type(error).__mro__]
    return any(name.startswith(_COMPILERS) for name in names)


def _boundary(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a compiled caller calls, instead of compiling it with itself."""

    @functools.wraps(compiled, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled(*arguments, **named)

    boundary: Callable[..., Any] = torch.compiler.disable(call, recursive=False)
    return boundary
