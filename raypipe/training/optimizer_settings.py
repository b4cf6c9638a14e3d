"""Settings of the optimizer and of its learning rate, the same in every experiment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from raypipe.config.settings import Settings

#: a number of optimizer steps, or a fraction of all of them
Share = Annotated[float, Field(gt=0, lt=1)]


class OptimizerSettings(Settings):
    """Optimizer, weight decay and learning rate of a training run."""

    clip_norm: PositiveFloat | None = None
    """Maximum norm of the gradient; no clipping if not given."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate, after warm-up."""
    optimizer: Literal["adam", "adamw", "adafactor", "muon"] = "adamw"
    """Optimizer. adafactor stores n + m values for an n x m weight where Adam stores 2 n m; its
    learning_rate is relative to the size of each weight. muon updates the matrices of the task's
    blocks, and adamw all other weights, with the same learning_rate.
    """
    weights: Literal["fp32", "bf16"] = "fp32"
    """Precision in which weights and gradients are stored. bf16 halves their memory; it needs
    `optimizer: adafactor`, which then rounds new weights at random, and `precision: bf16`.
    """
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment estimates."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: L2 penalty with adam, decoupled with the others."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Weights that decay: all, or those with two or more dimensions, which leaves out norms and
    biases.
    """
    warmup_steps: int | Share = Field(0, ge=0)
    """Linear warm-up from zero, in optimizer steps; below 1, a fraction of all steps."""
    schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = "cosine"
    """Learning-rate schedule after warm-up. warmup-stable-decay is constant until the last
    `decay_steps`.
    """
    decay_steps: PositiveInt | Share = 0.2
    """Length of the decay of warmup-stable-decay, in optimizer steps; below 1, a fraction of all
    steps.
    """
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of a schedule that decays, as a fraction of the peak."""

    def identity(self) -> dict[str, Any]:
        """Return the values that decide the result.

        A setting is left out where it has no effect.
        """
        identity = super().identity()
        if self.schedule != "warmup-stable-decay":
            del identity["decay_steps"]
        return identity
