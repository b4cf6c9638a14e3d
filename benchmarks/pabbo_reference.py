"""Reference for benchmarks/pabbo.py: the existing PABBO implementation, run as its users run it.

The module imports a checkout of the public repository draiqw/lgd (branch SABO, folder
``pabbo_method``) and calls its ``train()``. Dependencies that are not installed here and do not
affect the numbers are replaced before the import: ``wandb``, ``hydra``, ``omegaconf`` (logging and
configuration), ``botorch``, ``gpytorch`` and ``sobol_seq`` (used only by data sets and grids that
its ``train.yaml`` does not select). torchrl's ``MaskedCategorical`` is replaced by the equivalent
``torch.distributions.Categorical`` over logits that are ``-inf`` where masked. This repository
contains no line of that one.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from experiments.pabbo_lda.pabbo.evaluation import Scorer
from experiments.pabbo_lda.pabbo.functions import Candidates

MODEL = {
    "d_x": 1, "d_f": 1, "d_model": 32, "nhead": 2, "dropout": 0.0, "n_layers": 3,
    "dim_feedforward": 64, "emb_depth": 2, "tok_emb_option": "ind_point_emb_sum",
    "joint_model_af_training": True, "af_name": "mlp", "bound_std": False, "nbuckets": 2,
    "transformer_encoder_layer_cls": "efficient", "time_budget": True,
}  # fmt: skip

SAMPLER = {
    "kernel_list": ["rbf", "matern52", "matern32", "matern12"],
    "sample_kernel_weights": [0.25, 0.25, 0.25, 0.25],
    "lengthscale_range": [0.05, 2], "std_range": [0.1, 2], "p_iso": 0.5,
}  # fmt: skip

QUICK = {
    "n_steps": 2000, "n_burnin": 800, "batch_size": 16, "batch_size_2": 8, "lr": 1e-3,
    "lr_2": 3e-5, "n_random_pairs": 50, "num_prediction_points": 50, "num_query_points": 50,
    "n_trajectories": 10, "max_T": 30, "discount_factor": 0.98, "min_num_ctx": 1,
    "max_num_ctx": 20, "sobol_grid": False, "seed": 0,
}  # fmt: skip


class MaskedCategorical(Categorical):
    """Categorical distribution that never draws masked-out values (mask false)."""

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        super().__init__(logits=logits.masked_fill(~mask, float("-inf")))


class _Absent(ModuleType):
    """Stub module: any name can be imported, but not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load_reference(folder: Path) -> ModuleType:
    """Return the reference's ``train`` module, imported with the replacements above."""
    if not (folder / "train.py").is_file():
        raise ValueError(f"{folder} has no train.py: give the folder pabbo_method of the checkout")
    for name in (
        "wandb", "omegaconf", "hydra", "botorch", "botorch.models", "botorch.optim",
        "botorch.optim.fit", "gpytorch", "sobol_seq", "torchrl", "torchrl.modules",
    ):  # fmt: skip
        sys.modules[name] = _Absent(name)
    sys.modules["hydra"].main = lambda **_: lambda function: function  # type: ignore[attr-defined]
    sys.modules["torchrl.modules"].MaskedCategorical = MaskedCategorical  # type: ignore[attr-defined]
    sys.path.insert(0, str(folder))
    return importlib.import_module("train")


def _retry_sampling(reference: ModuleType) -> None:
    """Draw again if the reference's unbatched Cholesky fails, instead of ending its run."""
    sampler = reference.OptimizationSampler
    draw = sampler.sample_a_function

    def again(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return draw(*args, **kwargs)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                continue

    sampler.sample_a_function = again


def train_reference(folder: Path, out: Path, save_every: int, **changes: Any) -> None:
    """Run the reference's ``train()`` in this process.

    Every ``save_every`` steps, write its weights to ``out/<step>.pt`` and append ``step, cpu_s``
    (CPU time of the training so far, without the saving) to ``out/times.jsonl``.
    """
    reference = load_reference(folder)
    _retry_sampling(reference)
    out.mkdir(parents=True, exist_ok=True)
    kwargs = {**QUICK, **changes}
    spent_saving = 0.0
    torch.manual_seed(kwargs["seed"])
    start = time.process_time()
    save = torch.save

    def keep(checkpoint: dict[str, Any], _path: str) -> None:
        nonlocal spent_saving
        now = time.process_time()
        step = checkpoint["step"] - 1
        row = {"step": step, "cpu_s": now - start - spent_saving}
        save(checkpoint["model"], out / f"{step}.pt")
        with (out / "times.jsonl").open("a") as times:
            times.write(json.dumps(row) + "\n")
        spent_saving += time.process_time() - now

    torch.save = keep  # type: ignore[assignment]
    try:
        reference.train(
            expid="reference", exp_path=str(out / "log"),
            model=reference.TransformerModel(**MODEL), model_kwargs=MODEL, dataname="GP1D",
            x_range=[[-1.0, 1.0]], sampler_kwargs=SAMPLER, save_freq=save_every, print_freq=100,
            device="cpu", wb=False, **kwargs,
        )  # fmt: skip
    finally:
        torch.save = save


def reference_scorer(reference: ModuleType, weights: Path) -> Scorer:
    """Return a scorer with the reference's encoder and acquisition head, for our evaluation."""
    model = reference.TransformerModel(**MODEL)
    model.load_state_dict(torch.load(weights))
    model.eval()

    def score(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
        functions, runs = preferred.shape[:2]
        points = candidates.points.repeat_interleave(runs, 0)[..., None]
        pairs = candidates.pairs.repeat_interleave(runs, 0)
        encoded, count, _ = model.encode(
            query_src=duels.flatten(0, 1), c_src=preferred.flatten(0, 1)[..., None], eval_pos=points
        )
        encoded = encoded[:, -count:]
        index = pairs.flatten(1)[..., None].expand(-1, -1, encoded.shape[2])
        ends = encoded.gather(1, index).unflatten(1, (-1, 2)).flatten(2)
        time_used = ends.new_full((*ends.shape[:2], 1), used)
        scores: Tensor = model.af_mlp(torch.cat((ends, time_used), 2))
        return scores.view(functions, runs, -1)

    return score


if __name__ == "__main__":
    train_reference(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), seed=int(sys.argv[4]))
