"""``raypipe fit --card`` on a small language model; no card, no Ray, no training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raypipe.cards import calibration
from raypipe.cli import app
from raypipe.commands import prediction
from raypipe.commands.configuration import read
from raypipe.commands.declarations import PREDICTIONS
from raypipe.commands.prediction import conclusion, predict, shown
from raypipe.errors import ConfigError
from raypipe.hardware import Gpu, detect
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory, cache_directory
from raypipe.store.tables import read_table

SMALL = (
    "data.source=random", "model.vocabulary=300", "model.width=32", "model.heads=2",
    "model.layers=1", "model.feed_forward=64", "model.context=32", "train.training.steps=10",
    "train.training.warmup_steps=0", "train.training.effective_batch=8",
)  # fmt: skip
CARD = "{{memory_mib: {}, bandwidth: 100, tflops: {{fp32: 1}}, power_w: 50, capability: 6.1}}"
PLAIN = "NVIDIA Plain"  # a card with a single precision, so that little is recorded


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "own.yaml"
    file.write_text(f"cards: {{Plain: {CARD.format(16384)}}}")
    monkeypatch.setenv("RAYPIPE_CARDS", str(file))


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
    declared = {column.name for column in PREDICTIONS.columns}
    for row in rows:
        assert row.keys() <= declared
        assert row["samples_per_s_low"] < row["samples_per_s"] < row["samples_per_s_high"]
        assert row["hours"] * 3600 == pytest.approx(10 * 8 / row["samples_per_s"])
        parts = [row[name] for name in row if name.endswith("_bytes")]
        held = sum(parts) - sum(row[f"{n}_bytes"] for n in ("peak", "context", "capacity"))
        assert held == row["peak_bytes"]
        assert row["note"] == "predicted, uncalibrated"
    json.dumps(rows)
    assert columns(predicted("t4"), "precision") == ["fp16", "fp32"]


def test_only_the_named_precisions_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predicted("l4", precisions=["fp32"])
    assert columns(rows, "precision") == ["fp32"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "recording" in line]
    assert lines
    assert all(line.startswith("train, fp32: recording a step") for line in lines)
    file = tmp_path / "cards.yaml"
    half = CARD.format(16384).replace("6.1", "8.0").replace("fp32: 1", "fp32: 1, bf16: 2")
    file.write_text(f"cards: {{Half: {half}}}")
    every = predicted("all", file=file, precisions=["fp32"])
    assert set(columns(every, "precision")) == {"fp32"}
    assert {"Half", "T4"} <= set(columns(every, "card"))


def test_fp8_is_not_predicted_and_the_other_precisions_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = predicted("plain", "train.training.precision=fp8")
    assert columns(rows, "precision") == ["fp32"]
    assert "train.training.precision = fp8: is not predicted; measure it" in capsys.readouterr().err


def test_what_does_not_fit_is_tried_with_less_memory(tmp_path: Path) -> None:
    file = tmp_path / "cards.yaml"
    cards = {"Full": 540, "Small": 580}
    text = "".join(f"  {name}: {CARD.format(size)}\n" for name, size in cards.items())
    file.write_text(f"cards:\n{text}")
    large = ("model.context=512", "train.training.effective_batch=64")
    none = predicted("Full", *large, file=file)
    assert columns(none, "micro_batch") == [None, None]
    assert columns(none, "gradient_checkpointing") == [False, True]
    assert none[0]["note"] == "micro-batch 1 does not fit; predicted, uncalibrated"
    assert shown(none)[0]["batch"] == "none"
    some = predicted("Small", *large, file=file)
    without, recomputed = columns(some, "micro_batch")
    assert 1 <= without < recomputed <= 64
    room = 0.95 * 580 * 2**20 - some[0]["context_bytes"]
    for row in some:
        assert row["peak_bytes"] <= room
        assert row["micro_batch"] * row["accumulation"] >= 64
    for chosen, row in zip((False, True), some, strict=True):  # one of them halves the recordings
        given = {"file": file, "precisions": ["fp32"], "checkpointing": chosen}
        assert predicted("Small", *large, **given) == [{**row, "recommended": True}]


def test_cards_share_the_gradients_or_the_model() -> None:
    rows = predicted("plain", cards_per_node=2)
    assert set(columns(rows, "workers")) == {2}
    assert set(columns(rows, "strategy")) == {"ddp"}  # all of the batch fits
    sharded = predicted("plain", "train.scaling.strategy=fsdp", cards_per_node=2)
    assert set(columns(sharded, "strategy")) == {"fsdp"}
    for one, other in zip(rows, sharded, strict=True):
        assert other["optimizer_bytes"] == pytest.approx(one["optimizer_bytes"] / 2, rel=0.05)
    with pytest.raises(ConfigError, match=r"9 cards for train.training.effective_batch = 8"):
        predicted("plain", cards_per_node=9)


def test_the_cheapest_of_all_cards_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("cards: {A10: {price_per_hour: 1}, L4: {price_per_hour: 0.5}}")
    rows = predicted("all", file=file)
    assert len(set(columns(rows, "card"))) == len(rows) > 50
    priced = {row["card"]: row["cost"] for row in rows if row["cost"] is not None}
    assert set(priced) == {"A10", "L4"}
    best = min(priced, key=lambda name: priced[name])
    assert [row["card"] for row in rows if row["recommended"]] == [best]
    words = f"{best}, profile gpu_40gb, bf16, micro-batch 8 x accumulation 1 is the cheapest"
    assert words in conclusion(rows)


def test_all_cards_are_compared_by_the_same_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Profiles by memory or capability may have models of different sizes."""
    config = tmp_path / "two.yaml"
    config.write_text(
        "experiment: experiments.lm_pretrain\n"
        "profiles:\n  gpu: {model: {layers: 1}}\n"
        "  gpu_big: {min_gpu_memory_gb: 100, model: {layers: 3}}\n"
    )
    words = [word for word in SMALL if "layers" not in word]
    given = read(config), words
    rows = predict(*given, "all")
    assert "profile: gpu_big on all cards, as GB200 has it" in capsys.readouterr().err
    assert set(columns(rows, "profile")) == {"gpu_big"}
    assert len(set(columns(rows, "parameters_bytes"))) == 1
    own = predict(*given, "all", profile="gpu")
    assert max(columns(own, "parameters_bytes")) < min(columns(rows, "parameters_bytes"))
    assert set(columns(predict(*given, "l4"), "profile")) == {"gpu"}


def test_measurements_of_a_run_stand_beside_and_calibrate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "report", lambda location: location)
    before = predicted("plain")[0]
    run = RunDirectory.at(tmp_path / "run")
    trial = {
        "trial_id": "train", "stage": "train", "status": "succeeded", "device": PLAIN,
        "precision": "fp32", "micro_batch": 8, "workers": 1, "gradient_checkpointing": False,
        "compile": before["compile"], "strategy": "ddp",
        "samples_per_s": before["samples_per_s"] / 2, "gpu_peak_bytes": before["peak_bytes"] * 2,
    }  # fmt: skip
    ledger = Ledger(run)
    ledger.put_tables({"trials": {"train": trial}, "runs": {"run": {"run_id": "r"}}})
    del ledger
    after = predicted("plain", run_dir=str(tmp_path / "run"))[0]
    assert after["measured_samples_per_s"] == trial["samples_per_s"]
    assert after["samples_per_s"] == pytest.approx(trial["samples_per_s"])
    assert after["peak_bytes"] == pytest.approx(trial["gpu_peak_bytes"])
    assert after["measurements"] == calibration.load("Plain").number == 1
    assert after["note"] == "predicted, calibrated by 1 measurement(s)"
    stored = read_table(run, "card_predictions")
    assert list(stored["precision"]) == ["fp32"]
    assert predicted("plain")[0]["samples_per_s"] == after["samples_per_s"]


def test_a_measured_fit_calibrates_its_card() -> None:
    before = predicted("plain")[0]
    measured = {"stage": "train", "precision": "fp32", "micro_batch": 8, "failed": False}
    rows = [
        {**measured, "samples_per_s": before["samples_per_s"] * 0.8, "peak_bytes": 10**9},
        {**measured, "micro_batch": 4, "samples_per_s": 1.0, "peak_bytes": 10**9},
        {**measured, "samples_per_s": None, "micro_batch": None},
    ]
    node = replace(detect(), gpus=(Gpu(0, "", PLAIN, 2**34, "6.1"),))
    prediction.calibrate(read("lm_pretrain"), SMALL, "auto", rows, [node])
    found = calibration.load("Plain")
    assert found.number == 1
    assert found.speed == pytest.approx(0.8)
    other = replace(node, gpus=(Gpu(0, "", "NVIDIA Unknown", 2**34, "6.1"),))
    prediction.calibrate(
        read("lm_pretrain"), SMALL, "auto", rows, [other]
    )  # not listed: nothing to calibrate
    assert calibration.load("Plain") == found
    assert [path.name for path in (cache_directory() / "cards").glob("*.json")] == ["Plain.json"]


def test_mistakes_are_refused_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--card L5: unknown card; nearest names: .*L4"):
        predicted("L5")
    for precision, card in (("bf8", "L4"), ("fp8", "L4"), ("bf16", "T4")):
        with pytest.raises(ConfigError, match=rf"--precision {precision}: must be one of .*fp32"):
            predicted(card, precisions=["fp32", precision])
    with pytest.raises(ConfigError, match=r"--precision fp16: .*T5"):
        predict(read("summarization"), [], "L4", precisions=["fp16"])
    with pytest.raises(ConfigError, match=r"--run-dir .*: is not a run"):
        predicted("L4", run_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="command line: --stage = 'tokenize': must be a training"):
        predicted("L4", stage="tokenize")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("script.yaml").write_text(
        "experiment: raypipe.scripts\ntrain: {command: 'python train.py {micro_batch}'}\n"
    )
    with pytest.raises(ConfigError, match="cannot be predicted, since another program trains"):
        predict(read("script.yaml"), [], "L4")


@pytest.mark.parametrize(
    "option",
    [
        *(["--cards-per-node", "2"], ["--cards", "x"], ["--run-dir", "x"]),
        *(["--precision", "bf16"], ["--gradient-checkpointing"]),
    ],
)
def test_options_of_a_prediction_need_a_card(option: list[str]) -> None:
    found = CliRunner().invoke(app, ["fit", "lm_pretrain", *option])
    assert isinstance(found.exception, ConfigError)
    assert f"{option[0]}: needs --card" in str(found.exception)


def test_the_command_prints_a_table_or_json() -> None:
    command = ["fit", "lm_pretrain", *SMALL, "--card", "t4", "--precision", "fp32"]
    table = CliRunner().invoke(app, command).stdout
    assert "T4" in table
    assert "predicted, uncalibrated" in table
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert columns(rows, "precision") == ["fp32"]
