"""``raypipe fit --card`` on a small language model; no card, no Ray, no training."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raypipe.cards import forecast
from raypipe.cards.dry_run import StepCase, record
from raypipe.cards.recorder import Recording
from raypipe.cli import app
from raypipe.commands.configuration import read
from raypipe.commands.prediction import conclusion, predict, shown
from raypipe.errors import ConfigError
from raypipe.training import data_sheets
from raypipe.training.task import TrainTask

SMALL = (
    "data.source=random", "model.vocabulary=300", "model.width=32", "model.heads=2",
    "model.layers=1", "model.feed_forward=64", "model.context=32", "train.training.steps=10",
    "train.training.warmup_steps=0", "train.training.effective_batch=8",
)  # fmt: skip


CARDS = {"Plain": 16384, "Full": 540, "Small": 580, "Large": 131072}


@pytest.fixture(autouse=True)
def own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further cards of a single precision, so that little is recorded; two are small, one large."""
    known = dict(data_sheets.cards())
    for name, mebibytes in CARDS.items():
        given = mebibytes * 2**20, 1e11, {"fp32": 1e12}, 16e9, 50, 6.1
        known[name] = data_sheets.Card(name, name.lower(), *given)
    monkeypatch.setattr(data_sheets, "cards", lambda: known)


@pytest.fixture(scope="module", autouse=True)
def _recorded_once() -> Iterator[None]:
    """A step is recorded once for all tests."""
    known: dict[tuple[str, bytes], Recording] = {}

    def recorded(task: TrainTask, case: StepCase) -> Recording:
        key = repr(case), pickle.dumps(task)
        if key not in known:
            known[key] = record(task, case)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, "record", recorded)
        yield


@pytest.fixture(params=[("T4", "L4", "GB200")])
def few_cards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cards are these."""
    known = data_sheets.cards()
    few = {name: known[name] for name in request.param}
    monkeypatch.setattr(data_sheets, "cards", lambda: few)


def predicted(card: str, *overrides: str, **options: Any) -> list[dict[str, Any]]:
    return predict(read("lm_pretrain"), [*SMALL, *overrides], card, **options)


def columns(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_a_row_per_precision_that_the_card_supports() -> None:
    rows = predicted("l4")
    assert columns(rows, "precision") == ["bf16", "fp16", "tf32", "fp32"]
    assert set(columns(rows, "micro_batch")) == {8}
    assert set(columns(rows, "accumulation")) == {1}
    assert sum(columns(rows, "recommended")) == 1
    for row in rows:
        assert row["samples_per_s_low"] < row["samples_per_s"] < row["samples_per_s_high"]
        assert row["hours"] * 3600 == pytest.approx(10 * 8 / row["samples_per_s"])
        parts = [row[name] for name in row if name.endswith("_bytes")]
        held = sum(parts) - sum(row[f"{n}_bytes"] for n in ("peak", "context", "capacity"))
        assert held == row["peak_bytes"]
    json.dumps(rows)
    assert columns(predicted("t4"), "precision") == ["fp16", "fp32"]


def test_what_does_not_fit_is_tried_with_less_memory() -> None:
    large = ("model.context=512", "train.training.effective_batch=64")
    none = predicted("Full", *large)
    assert columns(none, "micro_batch") == [None, None]
    assert columns(none, "gradient_checkpointing") == [False, True]
    assert none[0]["note"] == "predicted: micro-batch 1 does not fit"
    assert shown(none)[0]["batch"] == "none"
    some = predicted("Small", *large)
    without, recomputed = columns(some, "micro_batch")
    assert 1 <= without < recomputed <= 64
    room = 0.95 * 580 * 2**20 - some[0]["context_bytes"]
    for row in some:
        assert row["peak_bytes"] <= room
        assert row["micro_batch"] * row["accumulation"] >= 64
    fixed = predicted("Small", *large, "train.training.gradient_checkpointing=true")
    assert fixed == [{**some[1], "recommended": True}]


def test_cards_share_the_gradients_or_the_model() -> None:
    rows = predicted("plain", "train.scaling.workers=2")
    assert set(columns(rows, "workers")) == {2}
    assert set(columns(rows, "strategy")) == {"ddp"}  # all of the batch fits
    sharded = predicted("plain", "train.scaling.strategy=fsdp", "train.scaling.workers=2")
    assert set(columns(sharded, "strategy")) == {"fsdp"}
    for one, other in zip(rows, sharded, strict=True):
        assert other["optimizer_bytes"] == pytest.approx(one["optimizer_bytes"] / 2, rel=0.05)
    with pytest.raises(ConfigError, match=r"train.*effective_batch"):
        predicted("plain", "train.scaling.workers=9")


@pytest.mark.usefixtures("few_cards")
def test_of_all_cards_the_one_of_the_least_energy_is_named() -> None:
    rows = predicted("all")
    assert sorted(columns(rows, "card")) == sorted(data_sheets.cards())
    best = min((row for row in rows if row["micro_batch"]), key=lambda row: row["energy_kwh"])
    assert [row["card"] for row in rows if row["recommended"]] == [best["card"]]
    words = f"{best['card']}, profile {best['profile']}, {best['precision']}, micro-batch 8"
    assert words in conclusion(rows)
    assert "takes the least energy" in conclusion(rows)


@pytest.mark.usefixtures("few_cards")
@pytest.mark.parametrize("few_cards", [("Plain", "Large")], indirect=True)
def test_all_cards_are_compared_by_the_same_training(capsys: pytest.CaptureFixture[str]) -> None:
    """Profiles by memory or capability may have models of different sizes."""
    words = [word for word in SMALL if "layers" not in word]
    given = read(Path(__file__).with_name("two_models.yaml")), words
    rows = predict(*given, "all")
    assert "profile: gpu_big on all cards, as Large has it" in capsys.readouterr().err
    assert set(columns(rows, "profile")) == {"gpu_big"}
    assert len(set(columns(rows, "parameters_bytes"))) == 1
    own = predict(*given, "all", profile="gpu")
    assert max(columns(own, "parameters_bytes")) < min(columns(rows, "parameters_bytes"))
    assert set(columns(predict(*given, "plain"), "profile")) == {"gpu"}


def test_the_command_prints_a_table() -> None:
    command = ["fit", "lm_pretrain", *SMALL, "--card", "plain"]
    table = CliRunner().invoke(app, command).stdout
    assert "Plain" in table
    assert "predicted: times are of optimizer steps" in table
