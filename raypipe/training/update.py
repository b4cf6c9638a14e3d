"""Weight update: unscale and clip gradients in one pass, skip fp16 overflows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.training import parallel, precision
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import TrainTask


class Update:
    """Optimizer of a model's parameters, with the gradient scaler for fp16."""

    def __init__(
        self, model: nn.Module, task: TrainTask, training: TrainingSettings, device: torch.device
    ) -> None:
        # cached: traversing the modules takes as long as scaling the gradients
        self._parameters: list[Tensor] = list(model.parameters())
        # gradients before the first pass are views of DDP's buckets: zeroed, never dropped
        self._has_views = any(p.grad is not None for p in self._parameters)
        self._clip = training.clip_norm
        self._scaler = precision.scaler(training.precision, device)
        self.needs_scale = self.skips_overflows
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self.optimizer = task.optimizer(model, training)
        # a group's rate relative to the settings'
        peak, groups = training.learning_rate, self.optimizer.param_groups
        self._factors = [float(group["lr"]) / peak for group in groups]

    @property
    def skips_overflows(self) -> bool:
        """Whether steps with non-finite gradients are skipped (fp16)."""
        return self._scaler.is_enabled()

    @property
    def skipped(self) -> int | None:
        """Number of skipped steps; None if steps are never skipped. Waits for the device."""
        return int(self._skipped.item()) if self.skips_overflows else None

    def choose_scale(self, weight: float) -> None:
        """Divide the first scale by about the weight per sample; call if ``needs_scale``.

        Losses are sums: without this, the gradients of long sequences overflow fp16 until the scale
        has been halved often enough. A power of two changes no digit of a gradient.
        """
        self.needs_scale = False
        if 0 < weight < math.inf:
            state = self._scaler.state_dict()
            state["scale"] = math.ldexp(state["scale"], 1 - math.frexp(weight)[1])
            self._scaler.load_state_dict(state)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss."""
        self._scaler.scale(loss).backward()

    def step(self, rate: float, scale: Tensor, *, norm: bool) -> Tensor | None:
        """Take an optimizer step with ``scale`` times the gradient at the learning rate ``rate``.

        Return the norm of the gradient before clipping if it is requested or needed, else None.
        """
        for group, factor in zip(self.optimizer.param_groups, self._factors, strict=True):
            group["lr"] = factor * rate
        self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        found = None
        if norm or self.skips_overflows or self._clip is not None:
            found = parallel.whole(nn.utils.get_total_norm(gradients)) * scale
        if found is not None and self._clip is not None:
            scale = scale * (self._clip / (found + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_
        held = parallel.local(gradients)
        torch._foreach_mul_(held, scale.to(held[0].dtype))
        if found is not None and self.skips_overflows:
            self._skipped += ~torch.isfinite(found)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=not self._has_views)
        return found

    def scaler_state(self) -> dict[str, Any]:
        """Return the state of the gradient scaler and the number of skipped steps."""
        return {**self._scaler.state_dict(), "skipped_steps": self._skipped.item()}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Restore the result of ``scaler_state``."""
        self.needs_scale = False
        self._skipped.fill_(state["skipped_steps"])
        self._scaler.load_state_dict({k: v for k, v in state.items() if k != "skipped_steps"})
