from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from experiments.lm_pretrain.dataset import RandomTokens
from experiments.lm_pretrain.model import (
    DecoderLayer,
    LanguageModel,
    LmSettings,
    flops_per_token,
    tiny,
)
from experiments.lm_pretrain.training import LanguageModelTask
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from raypipe.training.task import StepContext

SMALL = LmSettings(vocabulary=11, width=12, heads=3, layers=2, feed_forward=10, context=9)
CONTEXT = StepContext(0, Phase("train", 1, 8, 1e-3), 0)


def _task(settings: LmSettings = SMALL) -> LanguageModelTask:
    tokens = RandomTokens(settings.vocabulary, settings.context, 20, seed=3)
    held_out = RandomTokens(settings.vocabulary, settings.context, 8, seed=3, held_out=True)
    return LanguageModelTask(settings, tokens, held_out)


def _batch(task: LanguageModelTask, size: int) -> Tensor:
    return torch.stack([task.data[index] for index in range(size)])


def _model(task: LanguageModelTask) -> LanguageModel:
    torch.manual_seed(0)
    return task.build_model()


def _gradient(task: LanguageModelTask, parts: list[Tensor]) -> Tensor:
    model = _model(task).double()
    weight = 0.0
    for part in parts:
        loss = task.loss(model, part, CONTEXT)
        loss.total.backward()
        weight += float(loss.weight)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]) / weight


def test_any_split_into_micro_batches_has_the_same_gradient() -> None:
    task = _task()
    batch = _batch(task, 8)
    whole = _gradient(task, [batch])
    assert whole.norm() > 0
    for size in (4, 3, 1):
        split = _gradient(task, list(batch.split(size)))
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)


def test_the_loss_sums_what_each_next_token_costs() -> None:
    task = _task()
    model, batch = _model(task).double(), _batch(task, 3)
    loss = task.loss(model, batch, CONTEXT)
    probabilities = model(batch[:, :-1]).softmax(2)
    expected = -sum(
        probabilities[row, position, batch[row, position + 1]].log()
        for row in range(3)
        for position in range(SMALL.context)
    )
    torch.testing.assert_close(loss.total, expected)
    assert loss.total.dtype == torch.float64
    assert (loss.weight, task.counts) == (3 * SMALL.context, "tokens")


def test_the_loss_is_in_single_precision_under_autocast() -> None:
    task = _task()
    model, batch = _model(task), _batch(task, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1])
        loss = task.loss(model, batch, CONTEXT)
    assert (logits.dtype, loss.total.dtype) == (torch.bfloat16, torch.float32)
    expected = F.cross_entropy(logits.double().flatten(0, 1), batch[:, 1:].flatten())
    torch.testing.assert_close(loss.total.double() / loss.weight, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings", [tiny(), tiny().model_copy(update={"tied": True})])
def test_a_fresh_model_expects_any_token_alike(settings: LmSettings) -> None:
    task = _task(settings)
    loss = task.loss(_model(task), _batch(task, 8), CONTEXT)
    assert loss.total.item() / float(loss.weight) == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize(
    ("norm", "positions", "mlp", "tied"),
    list(
        itertools.product(
            ("rms", "layer"), ("rotary", "learned"), ("swiglu", "gelu"), (False, True)
        )
    ),
)
def test_every_combination_learns_a_batch(norm: str, positions: str, mlp: str, tied: bool) -> None:
    parts = {"norm": norm, "positions": positions, "mlp": mlp, "tied": tied}
    task = _task(LmSettings.model_validate(SMALL.model_dump() | parts))
    model, batch = _model(task), _batch(task, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    before = {name: value.clone() for name, value in model.named_parameters()}
    losses = []
    for _ in range(4):
        loss = task.loss(model, batch, CONTEXT)
        losses.append(loss.total.item())
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    unmoved = {name for name, value in model.named_parameters() if torch.equal(value, before[name])}
    assert not unmoved


def test_a_sample_depends_on_the_seed_its_number_and_its_side_alone() -> None:
    tokens = RandomTokens(50, 16, 100, seed=5)
    alone = tokens[37]
    assert (alone.shape, alone.dtype) == ((17,), torch.int64)
    assert torch.equal(tokens.__getitems__([2, 37])[1], alone)
    assert torch.equal(RandomTokens(50, 16, 38, seed=5)[37], alone)
    assert torch.equal(pickle.loads(pickle.dumps(tokens))[37], alone)
    for other in (
        tokens[36],
        RandomTokens(50, 16, 100, seed=6)[37],
        RandomTokens(50, 16, 100, seed=5, held_out=True)[37],
    ):
        assert (other == alone).float().mean() < 0.5


def test_a_loader_s_processes_draw_the_same_samples() -> None:
    tokens = RandomTokens(50, 16, 10, seed=5)
    expected = torch.stack([tokens[index] for index in range(10)])
    loader = DataLoader(tokens, batch_size=3, num_workers=2)
    assert torch.equal(torch.cat(list(loader)), expected)


def test_tokens_are_uniform() -> None:
    tokens = torch.stack(RandomTokens(7, 99, 70).__getitems__(list(range(70))))
    counts = tokens.flatten().bincount(minlength=7).double()
    assert len(counts) == 7
    # chi-squared with 6 degrees of freedom: 22.5 is its 0.999 quantile
    assert ((counts - 1000) ** 2 / 1000).sum() < 22.5


def test_the_number_of_samples_bounds_them() -> None:
    tokens = RandomTokens(7, 4, 3)
    assert len(tokens) == len(list(tokens)) == 3
    for index in (3, -1):
        with pytest.raises(IndexError, match=r"of 3"):
            tokens[index]


def test_the_task_tells_its_data_blocks_size_and_work() -> None:
    task = _task()
    model = task.build_model()
    assert list(task.blocks(model)) == list(model.layers)
    assert all(isinstance(block, DecoderLayer) for block in task.blocks(model))
    assert task.flops_per_sample(model) == 9 * flops_per_token(SMALL)
    assert LmSettings.model_validate_json(task.metadata()["model"]) == SMALL
    held_out = task.build_eval_dataset()
    assert held_out is not None
    assert not torch.equal(held_out[0], task.build_dataset()[0])
    (phase,) = task.phases(TrainingSettings(epochs=3), effective_batch=8)
    assert phase.steps == 8


def test_the_task_is_picklable() -> None:
    task = pickle.loads(pickle.dumps(_task()))
    assert (task.settings, task.data) == (SMALL, _task().data)


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "recompute": "cheap"},
        {"precision": "bf16"},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
        pytest.param({"compile": True, "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_the_loop_trains_it_alike_however_it_is_computed(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    settings = LmSettings(vocabulary=50, width=32, heads=2, layers=2, feed_forward=48, context=16)

    def losses(name: str, **training: Any) -> list[float]:
        given = TrainingSettings(steps=5, log_every=1, learning_rate=1e-2, **training)
        data = RandomTokens(50, 16, 64)
        job = TrainingJob("lm", "run", LanguageModelTask(settings, data, data),
            TrainStageSettings(training=given), BatchPlan(4, 2, 8, 1),
            RunDirectory.at(tmp_path / name))  # fmt: skip
        outcome = train(job, Worker(0, torch.device("cpu")))
        assert outcome["eval_loss"] > 0
        assert outcome["tokens_per_s"] > 0
        return list(read_table(job.run_dir, "steps")["loss"])

    plain, other = losses("plain"), losses("other", **changed)
    rel = 1e-2 if "precision" in changed else 1e-5
    torch.testing.assert_close(other, plain, rtol=rel, atol=0)
