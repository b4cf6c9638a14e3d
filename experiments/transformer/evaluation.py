"""Evaluation of the trained model on the held-out rows, with a trivial baseline."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
)
from torch.utils.data import DataLoader

from experiments.transformer.data import Data, Target
from experiments.transformer.dataset import StoredSamples
from experiments.transformer.model import Transformer, TransformerSettings
from experiments.transformer.training import TransformerTask
from raypipe.pipeline.context import StageContext
from raypipe.storage.run_directory import RunDirectory
from raypipe.training.weights import read_weights

_BATCH = 64
#: most frequent classes in the confusion matrix
_SHOWN = 12
OTHERS = "others"


def evaluate(context: StageContext, data: Data, model: TransformerSettings, trial_id: str) -> None:
    """Write rows of ``measures`` (the model and the baseline) and of ``confusion``."""
    on_gpu = context.stage.on_gpu
    outputs = context.call("evaluate", predict, context.run_dir, model, trial_id, on_gpu=on_gpu)
    target, gold = data.target, data.test.target
    if target.kind == "classification":
        predicted = outputs.argmax(1)
        common = np.full_like(gold, np.bincount(data.train.target).argmax())
        confusion = confused(gold, predicted, target)
        rows = {f"{row['gold']}/{row['predicted']}": row for row in confusion}
        context.ledger.put("confusion", rows)
        methods = {"transformer": predicted, "majority class": common}
    else:
        methods = {"transformer": outputs[:, 0], "training mean": np.zeros_like(gold)}
    for method, prediction in methods.items():
        measured = measures(gold, prediction, target)
        row = {"method": method, "rows": len(gold), **measured}
        context.ledger.put("measures", {method: row})
        context.say(f"{method}: {', '.join(f'{k} {v:.4g}' for k, v in measured.items())}")


def predict(
    run_dir: RunDirectory, model: TransformerSettings, trial_id: str
) -> NDArray[np.float32]:
    """Task: return the outputs ``[n, K]`` for the held-out rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Transformer(model)
    network.load_state_dict(read_weights(run_dir, run_dir.model(trial_id))[0])
    network.to(device).eval()
    samples = StoredSamples(run_dir, "test")
    collate = TransformerTask(model, samples).collate()
    parts = []
    with torch.inference_mode():
        for *inputs, _ in DataLoader(samples, _BATCH, collate_fn=collate):
            parts.append(network(*(each.to(device) for each in inputs)).float().cpu().numpy())
    return np.concatenate(parts)


def measures(gold: NDArray[Any], predicted: NDArray[Any], target: Target) -> dict[str, float]:
    """Return accuracy and macro-F1 over the classes of ``gold``; or RMSE, MAE and R2."""
    if target.kind == "classification":
        classes = np.unique(gold)
        f1 = f1_score(gold, predicted, labels=classes, average="macro", zero_division=0)
        return {"accuracy": float(accuracy_score(gold, predicted)), "macro_f1": float(f1)}
    truth, found = (
        target.mean + target.deviation * v.astype(np.float64) for v in (gold, predicted)
    )
    measured = {
        "rmse": float(root_mean_squared_error(truth, found)),
        "mae": float(mean_absolute_error(truth, found)),
    }
    if len(truth) > 1:  # otherwise it is not defined
        measured["r2"] = float(r2_score(truth, found))
    return measured


def confused(
    gold: NDArray[np.int64], predicted: NDArray[np.int64], target: Target
) -> list[dict[str, Any]]:
    """Count predictions by class, for the most frequent classes; the rest is one class."""
    frequent = np.argsort(-np.bincount(gold, minlength=len(target.classes)), kind="stable")
    shown = {int(index): target.classes[index] for index in frequent[:_SHOWN]}
    pairs = Counter(
        (shown.get(int(true), OTHERS), shown.get(int(found), OTHERS))
        for true, found in zip(gold, predicted, strict=True)
    )
    return [
        {"gold": true, "predicted": found, "rows": number}
        for (true, found), number in sorted(pairs.items())
    ]
