"""Hugging Face's Trainer, with the same training as the other contenders.

Its filter of non-finite losses is off, because it reads each loss from the device. Printing of
logged values, checkpoints and progress bars are off, too. It receives the benchmark's optimizer
and schedule, because its own cosine schedule begins one step earlier.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import default_collate
from transformers import PrinterCallback, Trainer, TrainingArguments

from benchmarks.loops.cases import CLIP_NORM, LOG_EVERY, Case
from benchmarks.loops.measure import Logged


class _Trainer(Trainer):
    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: ARG002
        num_items_in_batch: Tensor | int | None = None,  # noqa: ARG002
    ) -> Any:
        return model(inputs["batch"])


def _collate(samples: list[Any]) -> dict[str, Any]:
    """Return a batch as the one keyword argument of the model."""
    return {"batch": default_collate(samples)}


def train(case: Case, device: torch.device) -> list[Logged]:
    """Train and return the mean losses between logged steps."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = case.model(device)
    optimizer = case.optimizer(model)
    loader = {f"dataloader_{name}": value for name, value in case.loader_settings(device).items()}
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=device.type == "cpu",
            max_steps=case.steps,
            per_device_train_batch_size=case.micro_batch,
            gradient_accumulation_steps=case.accumulation,
            max_grad_norm=CLIP_NORM,
            bf16=case.training.precision == "bf16",
            torch_compile=case.training.compile,
            train_sampling_strategy="sequential",
            logging_steps=LOG_EVERY,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=case.training.seed,
            **loader,
        )
        trainer = _Trainer(
            model,
            arguments,
            data_collator=_collate,
            train_dataset=case.task.build_dataset(),
            optimizers=(optimizer, case.scheduler(optimizer)),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses: list[Logged] = []
    for row in trainer.state.log_history:
        if "loss" in row:
            last = int(row["step"]) * case.accumulation
            losses.append(Logged(last - LOG_EVERY * case.accumulation, last, row["loss"]))
    return losses
