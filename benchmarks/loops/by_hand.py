"""Minimal hand-written training loop, the reference of the benchmark.

It uses fused AdamW, PyTorch's multi-tensor functions for norm and clipping, model and loss compiled
together, and asynchronous copies from page-locked memory. It reads losses from the device only when
they are logged.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.loops.cases import CLIP_NORM, LOG_EVERY, Case
from benchmarks.loops.measure import Logged


def train(case: Case, device: torch.device) -> list[Logged]:
    """Train and return the loss of every micro-batch."""
    model = case.model(device)
    optimizer = case.optimizer(model)
    if case.training.compile:
        model.compile()
    half = case.training.precision == "bf16"
    parameters = list(model.parameters())
    batches = iter(case.loader(device))
    losses: list[float] = []
    pending: list[Tensor] = []
    for step in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = case.rate(step)
        for _ in range(case.accumulation):
            batch = _on(device, next(batches))
            with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
                loss = model(batch)
            (loss / case.accumulation).backward()
            pending.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % LOG_EVERY == 0:
            losses += torch.stack(pending).tolist()
            pending.clear()
    return [Logged(number, number + 1, loss) for number, loss in enumerate(losses)]


def _on(device: torch.device, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return [part.to(device, non_blocking=True) for part in batch]
