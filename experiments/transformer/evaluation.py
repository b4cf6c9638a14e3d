"""Evaluation of the model and its branches on the held-out rows, with a trivial baseline."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset

from experiments.common.blocks import map_blocks
from experiments.common.evaluation import load_trained, measure_rows, task_arithmetic, task_device
from experiments.transformer.comparison import measures, store_predictions
from experiments.transformer.data import PredictionTarget, Splits
from experiments.transformer.model import Transformer, combined
from experiments.transformer.settings import TransformerSettings
from experiments.transformer.tables import OWN, TRANSFORMER
from experiments.transformer.training import StoredSamples, TransformerTask
from raypipe import RunDirectory, StageContext, precision

_BATCH = 64
#: rows that are worth a task
_BLOCK = 8192
#: most frequent classes in the confusion matrix
_SHOWN = 12
OTHERS = "others"


def run_evaluate(data: Splits, context: StageContext) -> None:
    """Record the measures of the transformer and of a baseline, and the confusion of classes.

    With a branch on n-grams, each branch is measured alone, too.
    """
    model = context.settings.model.completed(data.sizes())
    target, gold = data.target, data.held_out.target
    arguments = (context.run_dir, model, context.settings.train.training.precision)
    blocks = map_blocks(
        context,
        {"held_out": len(gold)},
        _BLOCK,
        lambda block: (predict, *arguments, range(block.start, block.end)),
        on_gpus=context.stage.on_gpu,
    )
    parts = np.concatenate([part for _, part in blocks])
    outputs = {name: parts[:, i] for i, name in zip(range(parts.shape[1]), OWN, strict=False)}
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    if target.kind == "classification":
        methods = {name: values.argmax(1) for name, values in outputs.items()}
        store_predictions(context, methods)
        pairs = confused(gold, methods[TRANSFORMER], target)
        methods["majority class"] = np.full_like(gold, np.bincount(data.train.target).argmax())
        rows["confusion"] = {f"{row['gold']}/{row['predicted']}": row for row in pairs}
    else:
        methods = {name: values[:, 0] for name, values in outputs.items()}
        methods["training mean"] = np.zeros_like(gold)
    measured = {method: measures(gold, guess, target) for method, guess in methods.items()}
    rows["measures"] = measure_rows(context, {"rows": len(gold)}, measured)
    context.finish(context.stage.name, rows)


def predict(
    run_dir: RunDirectory, model: TransformerSettings, arithmetic: precision.Precision, part: range
) -> NDArray[np.float32]:
    """Task: return outputs ``[n, M, K]`` for ``n`` held-out rows.

    They are those of the model, and of each of its branches if there are two.
    """
    device = task_device()
    network = load_trained(Transformer(model), run_dir).to(device)
    samples = StoredSamples(run_dir, "held_out")
    collate = TransformerTask(model, samples).collate()
    parts = []
    with torch.inference_mode(), task_arithmetic(arithmetic):
        for *inputs, _ in DataLoader(Subset(samples, part), _BATCH, collate_fn=collate):
            branches = network.branches(*(tensor.to(device) for tensor in inputs))
            outputs = [combined(branches, model), *(branches if len(branches) > 1 else ())]
            parts.append(torch.stack(outputs, 1).float().cpu().numpy())
    return np.concatenate(parts)


def confused(
    gold: NDArray[np.int64], predicted: NDArray[np.int64], target: PredictionTarget
) -> list[dict[str, Any]]:
    """Count predictions by class, for the most frequent classes; the rest is one class."""
    frequent = np.argsort(-np.bincount(gold, minlength=len(target.classes)), kind="stable")
    shown = {int(index): target.classes[index] for index in frequent[:_SHOWN]}
    pairs = Counter(
        (shown.get(int(true), OTHERS), shown.get(int(guess), OTHERS))
        for true, guess in zip(gold, predicted, strict=True)
    )
    return [
        {"gold": true, "predicted": guess, "rows": number}
        for (true, guess), number in sorted(pairs.items())
    ]
