"""nanoGPT's own ``train.py``, run as it is from a copy of its repository.

It is a script that reads its settings from the command line and paths from the current directory,
so it runs there under its own name, and what it prints is read.
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
    """Train; the loss of each logged step. It evaluates once before the first step, on one batch.

    Args:
        repository: of nanoGPT.
        data: the folder of its ``train.bin``, ``val.bin`` and ``meta.pkl``.
        model: the sizes; its parts are those of nanoGPT.
        case: batch, steps, rates and logging.

    Raises:
        RuntimeError: its model has another number of parameters than ours of these settings.

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
    """The process as the script expects it: its directory, its modules, its arguments."""
    held = sys.argv, sys.path[:], torch.get_rng_state()
    sys.argv, sys.path[:0] = ["train.py", *arguments], [os.fspath(repository)]
    try:
        with chdir(repository), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names of PyTorch that have moved since
            yield
    finally:
        sys.argv, sys.path[:] = held[:2]
        torch.set_rng_state(held[2])
        sys.modules.pop("model", None)
