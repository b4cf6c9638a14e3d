"""nanoGPT's unchanged ``train.py``, run from a copy of its repository.

The script reads its settings from the command line and its paths from the current directory. It
therefore runs in its directory under its own name, and the benchmark parses its output.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import torch

from benchmarks.loops.cases import CLIP_NORM, LOG_EVERY, Case
from benchmarks.loops.measure import Logged
from experiments.lm_pretrain.model import LmSettings


def train(repository: Path, data: Path, model: LmSettings, case: Case) -> list[Logged]:
    """Train and return the loss of each logged step.

    The script evaluates once before the first step, on one batch.

    Args:
        repository: a copy of nanoGPT's repository.
        data: the folder of its ``train.bin``, ``val.bin`` and ``meta.pkl``.
        model: the sizes of the model; its components are nanoGPT's.
        case: batch size, steps, learning rates and logging.

    Raises:
        RuntimeError: its model has a different number of parameters from ours with these settings.

    """
    t = case.training
    settings = {
        "device": "cpu", "compile": False, "dtype": "float32", "dataset": str(data),
        "out_dir": str(data / "out"), "eval_interval": 10**9, "eval_iters": 1,
        "log_interval": LOG_EVERY, "always_save_checkpoint": False, "batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation, "block_size": model.context,
        "n_layer": model.layers, "n_head": model.heads, "n_embd": model.width, "dropout": 0.0,
        "bias": False, "learning_rate": t.learning_rate, "min_lr": t.learning_rate * t.min_lr_ratio,
        "max_iters": case.steps - 1, "lr_decay_iters": case.steps, "warmup_iters": t.warmup_steps,
        "beta1": t.betas[0], "beta2": t.betas[1], "weight_decay": t.weight_decay,
        "grad_clip": CLIP_NORM,
    }  # fmt: skip
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    with _as_script(repository, arguments), redirect_stdout(StringIO()) as printed:
        left = runpy.run_path("train.py", run_name="__main__")
    expected, found = _size(case.task.build_model()), _size(left["model"])
    if found != expected:
        raise RuntimeError(f"nanoGPT's model has {found} parameters instead of {expected}")
    lines = re.findall(r"^iter (\d+): loss ([\d.]+),", printed.getvalue(), re.MULTILINE)
    return [Logged(int(step), int(step) + 1, float(loss)) for step, loss in lines]


def _size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def _as_script(repository: Path, arguments: list[str]) -> Iterator[None]:
    """Set the directory, modules and arguments of the process as the script expects them."""
    held = sys.argv, sys.path[:], torch.get_rng_state()
    sys.argv, sys.path[:0] = ["train.py", *arguments], [os.fspath(repository)]
    try:
        with chdir(repository), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch names that have moved since
            yield
    finally:
        sys.argv, sys.path[:] = held[:2]
        torch.set_rng_state(held[2])
        sys.modules.pop("model", None)
