"""The optimizer of the settings, and the weight update: unscale, clip, step.

AdamW, Adam, Adafactor, or Muon for the matrices of the blocks with AdamW for all other weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from raypipe.training import parallel
from raypipe.training.settings import TrainingSettings

#: entries of a bf16 weight that are updated at a time, in fp32
_AT_ONCE = 2**24


def build(
    model: nn.Module, blocks: Iterable[nn.Module], training: TrainingSettings
) -> torch.optim.Optimizer:
    """Return the optimizer of ``training.optimizer`` for the parameters of a model.

    Args:
        model: the model on its device, maybe sharded.
        blocks: its repeated blocks, whose matrices Muon updates.
        training: the settings.

    Raises:
        ValueError: Muon has no matrices to update.

    """
    parameters = list(model.parameters())
    options: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if training.optimizer == "adafactor":
        return Adafactor(parameters, **options)
    plain: dict[str, type[Adam]] = {"adam": Adam, "adamw": AdamW}
    if kind := plain.get(training.optimizer):
        return kind(parameters, betas=training.betas, fused=True, **options)
    hidden = _matrices(blocks)
    if not hidden:
        raise ValueError(
            "training.optimizer = muon: this task names no blocks with matrices "
            "(TrainTask.blocks); name them, or use adamw"
        )
    chosen = set(hidden)
    others = [parameter for parameter in parameters if parameter not in chosen]
    matrices, rest = ({"params": own, **options} for own in (hidden, others))
    return MuonWithAdamW(matrices, rest, training.betas)


def _matrices(blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the matrices of blocks, each once, without embeddings."""
    modules = [module for block in blocks for module in block.modules()]
    looked_up = {p for m in modules if isinstance(m, nn.Embedding) for p in m.parameters()}
    every = dict.fromkeys(p for module in modules for p in module.parameters())
    return [p for p in every if p.ndim == 2 and p not in looked_up]


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` in fp32 on CPUs, and for matrices whose rows are sharded, as by FSDP.

    torch's own (2.13) always multiplies in bf16, which takes a CPU without instructions for it 30
    times as long as fp32, and exchanges a sharded matrix in every product. Here it is gathered
    once, and every worker orthogonalizes it, as with DDP. Momentum and weights stay sharded.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take an optimizer step; ``closure`` is ignored."""
        del closure
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group)

    def _update(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        whole = parallel.whole(update.to(product_type(update.device)))
        direction = orthogonalized(whole, group)[parallel.own_rows(matrix)]
        weight = parallel.local(matrix)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some weights and AdamW for the others, as one optimizer.

    Muon orthogonalizes the momentum of a matrix (Jordan et al. 2024). Its rate is scaled so that
    updates are as large as AdamW's (Liu et al. 2025, Muon is scalable for LLM training, section
    2.2), which makes one learning rate serve both.

    Args:
        matrices: the matrices for Muon, with their options.
        others: all other weights for AdamW, with theirs.
        betas: the decay rates of AdamW's moments.

    """

    def __init__(
        self, matrices: dict[str, Any], others: dict[str, Any], betas: tuple[float, float]
    ) -> None:
        muon = Muon([matrices], adjust_lr_fn="match_rms_adamw")
        has_others = bool(others["params"])
        rest = [AdamW([others], betas=betas, fused=True)] if has_others else []
        self._parts: Sequence[torch.optim.Optimizer] = [muon, *rest]
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take an optimizer step; ``closure`` is ignored."""
        del closure
        groups = iter(self.param_groups)
        for part in self._parts:  # loading a state replaces the groups and the state
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
            part.step()


def product_type(device: torch.device) -> torch.dtype:
    """Return the type of the products on a device.

    A CPU without instructions for bf16 takes 30 times as long in it as in fp32.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a matrix with the singular vectors of ``update`` and singular values near 1.

    These are the Newton-Schulz iterations of ``torch.optim.Muon``, in the type of ``update``.
    """
    a, b, c = group["ns_coefficients"]
    rows, columns = update.shape
    wide = update.T if rows > columns else update
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if rows > columns else wide


class Adafactor(torch.optim.Adafactor):
    """``torch.optim.Adafactor`` that never waits for the device, for plain and sharded weights.

    torch's own (2.13) reads two norms per weight on the host, does not support ``DTensor``, and
    rounds bf16 weights to the nearest value. The state is the same (Shazeer and Stern 2018,
    Adafactor: adaptive learning rates with sublinear memory cost, algorithms 4 and 5). A sharded
    gradient is gathered when its weight is updated, and every worker holds the whole state, which
    is small. A step may overwrite the gradients.

    Means and rates of bf16 weights are in fp32, and new weights are rounded at random.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        #: of the number of entries of a weight, on its device
        self._roots: dict[Tensor, Tensor] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch would round its means to the precision of the weights."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, values in state_dict["state"].items():
            parameter = parameters[index]
            for key in values.keys() - {"step"}:
                self.state[parameter][key] = values[key].to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take an optimizer step; ``closure`` is ignored."""
        del closure
        noise = None
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not held:
                continue
            norms = [self._direct(parameter, group) for parameter in held]
            # scalars of all weights at once: a kernel for each would take as long as the updates
            sizes, changes, roots = map(torch.stack, zip(*norms, strict=True))
            rates = (sizes / roots).clamp_(min=group["eps"][1])
            rates /= (changes / (roots * group["d"])).clamp_(min=1.0)
            for parameter, rate in zip(held, rates, strict=True):
                step = self.state[parameter]["step"].item()  # on the CPU
                if noise is None:
                    noise = torch.Generator(parameter.device).manual_seed(int(step))
                _update(parameter, rate, min(group["lr"], step**-0.5), group, noise)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a weight, which may be new, in its next step."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            shape, exact = parameter.shape, torch.promote_types(parameter.dtype, torch.float32)
            zeros = partial(torch.zeros, dtype=exact, device=parameter.device)
            state["step"] = torch.zeros(())
            if parameter.dim() > 1:
                state["row_var"] = zeros((*shape[:-1], 1))
                state["col_var"] = zeros((*shape[:-2], 1, shape[-1]))
            else:
                state["variance"] = zeros(shape)
        state["step"] += 1
        return state

    def _direct(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the gradient of a weight by its update, before it is clipped and scaled.

        Return the norms of the weight and of the update, and the root of the number of entries.
        """
        state, gradient = self._state_of(parameter), parallel.whole(cast("Tensor", parameter.grad))
        exact = torch.promote_types(parameter.dtype, torch.float32)
        share = state["step"].item() ** group["beta2_decay"]  # on the CPU
        tiny = group["eps"][0] or torch.finfo(exact).eps
        if "row_var" in state:
            rows, columns = state["row_var"], state["col_var"]
            for moment, side in ((rows, -1), (columns, -2)):
                norms = torch.linalg.vector_norm(gradient, dim=side, keepdim=True, dtype=exact)
                moment.mul_(1 - share).addcmul_(norms, norms, value=share / parameter.shape[side])
            variance = rows / rows.mean(dim=-2, keepdim=True).clamp_(min=tiny) * columns
            variance.clamp_(min=tiny * tiny)
        else:
            squares = gradient.to(exact).square()
            variance = state["variance"].lerp_(squares, share).clamp(min=tiny * tiny)
        gradient.mul_(variance.rsqrt_())
        if (own := parallel.local(cast("Tensor", parameter.grad))) is not gradient:
            own.copy_(gradient[parallel.own_rows(parameter)])
        size = parallel.whole(torch.linalg.vector_norm(parameter, dtype=exact))
        if parameter not in self._roots:
            self._roots[parameter] = torch.full_like(size, math.sqrt(parameter.numel()))
        return size, torch.linalg.vector_norm(gradient, dtype=exact), self._roots[parameter]


def _update(
    parameter: Tensor, rate: Tensor, limit: float, group: dict[str, Any], noise: torch.Generator
) -> None:
    """Add ``limit * rate`` times the update in its gradient to a weight, after weight decay."""
    weight, update = parallel.local(parameter), parallel.local(cast("Tensor", parameter.grad))
    kept = 1 - group["lr"] * group["weight_decay"]
    if weight.dtype == torch.bfloat16:
        _update_half(weight, update, rate * limit, kept, noise)
    else:
        weight.mul_(kept).addcmul_(update, rate, value=-limit)


def _update_half(
    weight: Tensor, update: Tensor, rate: Tensor, kept: float, noise: torch.Generator
) -> None:
    """Set a bf16 weight to ``kept * weight - rate * update``, rounded up or down at random.

    The probabilities keep the mean: updates far below the spacing of bf16 have their effect over
    many steps, where rounding to the nearest value would drop each of them.
    """
    parts = zip(weight.view(-1).split(_AT_ONCE), update.view(-1).split(_AT_ONCE), strict=True)
    for part, change in parts:
        value = part.float().mul_(kept).addcmul_(change.float(), rate, value=-1)
        bits = value.view(torch.int32)  # bf16 has the upper half of them
        bits += torch.randint(
            2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=noise
        )
        part.copy_(bits.bitwise_and_(-(2**16)).view(torch.float32))


class Update:
    """Optimizer of a model's parameters, with the gradient scaler for fp16."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        training: TrainingSettings,
        device: torch.device,
    ) -> None:
        # cached: traversing the modules takes as long as scaling the gradients
        self._parameters: list[Tensor] = list(model.parameters())
        # gradients before the first pass are views of DDP's buckets: zeroed, never dropped
        self._has_views = any(p.grad is not None for p in self._parameters)
        self._clip = training.clip_norm
        # torch's own first scale, 2^16, makes every gradient above 1 of a mean loss overflow
        is_half = training.precision == "fp16"
        self._scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14, enabled=is_half)
        self.needs_scale = self.skips_overflows
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self.optimizer = optimizer
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
        held = list(map(parallel.local, gradients))
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
        self._scaler.load_state_dict(state)
