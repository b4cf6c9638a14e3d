"""Training loop with Hugging Face Accelerate, as in its documentation.

Losses stay on the device between logged steps.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from benchmarks.loops.cases import CLIP_NORM, LOG_EVERY, Case
from benchmarks.loops.measure import Logged


def train(case: Case, device: torch.device) -> list[Logged]:
    """Train and return the loss of every micro-batch."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if case.training.precision == "bf16" else "no",
        gradient_accumulation_steps=case.accumulation,
        dynamo_backend="inductor" if case.training.compile else "no",
    )
    model = case.model(device)
    optimizer = case.optimizer(model)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, case.loader(device), case.scheduler(optimizer)
    )
    losses: list[float] = []
    pending: list[Tensor] = []
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        pending.append(loss.detach())
        if accelerator.sync_gradients:
            step += 1
            if step % LOG_EVERY == 0:
                losses += torch.stack(pending).tolist()
                pending.clear()
    return [Logged(number, number + 1, loss) for number, loss in enumerate(losses)]
