"""Lightning's Trainer, with the same training as the other contenders.

Checkpoints, progress bar, summary and sanity checks are off, and logged values go to a list. (Its
``barebones`` mode would log nothing.) The clipping hook is overridden and calls the PyTorch
function that Lightning would call, because Lightning refuses to clip with fused AdamW in bf16.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from benchmarks.loops.cases import CLIP_NORM, LOG_EVERY, Case
from benchmarks.loops.measure import Logged


class _Module(lightning.LightningModule):
    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        self.case = case
        self.model = case.model(device)
        if case.training.compile:
            self.model.compile()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002
        loss: Tensor = self.model(batch)
        self.log("loss", loss)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
        gradient_clip_val: float | None = None,  # noqa: ARG002
        gradient_clip_algorithm: str | None = None,  # noqa: ARG002
    ) -> None:
        # Lightning refuses to clip with a fused optimizer in mixed precision
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)

    def configure_optimizers(self) -> Any:
        optimizer = self.case.optimizer(self.model)
        scheduler = {"scheduler": self.case.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class _List(Logger):
    name = version = "list"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, float]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, metrics["loss"]))

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        del arguments, named


def train(case: Case, device: torch.device) -> list[Logged]:
    """Train and return the loss of the last micro-batch of each logged step."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logger = _List()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few loader processes and no checkpoints are intended
        trainer = lightning.Trainer(
            accelerator=device.type,
            devices=1,
            precision="bf16-mixed" if case.training.precision == "bf16" else "32-true",
            max_steps=case.steps,
            accumulate_grad_batches=case.accumulation,
            logger=logger,
            log_every_n_steps=LOG_EVERY,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(_Module(case, device), case.loader(device))
    return [
        Logged((step + 1) * case.accumulation - 1, (step + 1) * case.accumulation, loss)
        for step, loss in logger.rows
    ]
