"""``raypipe sweep --card`` on a small language model; no card, no Ray, no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_overloads

import pytest
from typer.testing import CliRunner

import raypipe as rp
from raypipe import hardware
from raypipe.cli import app
from raypipe.commands import prediction
from raypipe.commands.prediction import Wanted
from raypipe.commands.prediction_table import PREDICTIONS
from raypipe.commands.prediction_view import conclusion_of_points, shown_points
from raypipe.commands.request import Request
from raypipe.commands.sweep_prediction import predict_sweep
from raypipe.errors import ConfigError
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_table

SMALL = (
    "data.source=random", "model.vocabulary=300", "model.width=32", "model.heads=2",
    "model.layers=1", "model.feed_forward=64", "model.context=512", "train.training.compile=false",
    "sweep.axes.training.precision=[fp32]", "sweep.axes.training.gradient_checkpointing=null",
    "sweep.axes.training.micro_batch=[2,8,64]", "sweep.constraints.effective_batch=64",
)  # fmt: skip
MICRO_BATCH = "sweep.axes.training.micro_batch=[2]"
CARD = "{memory_mib: %d, bandwidth: 100, tflops: {fp32: 1}, power_w: 50, capability: 6.1}"


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "own.yaml"
    file.write_text(f"cards: {{Small: {CARD % 1000}, Large: {CARD % 16384}}}")
    monkeypatch.setenv("RAYPIPE_CARDS", str(file))


def points(*overrides: str, card: str = "Large", **more: Any) -> list[dict[str, Any]]:
    request = Request("sweep", "sweeps/lm_pretrain", [*SMALL, *overrides], **more)
    return predict_sweep(request, Wanted(card))


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


def test_points_are_in_the_order_of_their_speed_and_one_is_recommended() -> None:
    rows = points()
    speeds = column(rows, "samples_per_s")
    assert speeds == sorted(speeds, reverse=True)
    assert set(column(rows, "point")) == {f"micro_batch={n} precision=fp32" for n in (2, 8, 64)}
    assert column(rows, "skipped") == [False] * 3
    (best,) = [row for row in rows if row["recommended"]]
    # as fast within 2 %, and with the least memory of those
    close = [row for row in rows if row["samples_per_s"] >= 0.98 * max(speeds)]
    assert best["peak_bytes"] == min(column(close, "peak_bytes"))
    declared = {column.name for column in PREDICTIONS.columns}
    assert all(row.keys() <= declared for row in rows)
    assert column(rows, "hours") == [None] * 3  # of a few steps
    json.dumps(rows)
    said = conclusion_of_points(rows)
    assert said.startswith("3 of 3 points would run, 0 are skipped\npredicted to be recommended: ")
    assert [row["order"] for row in shown_points(rows)] == ["1", "2", "3"]


def test_what_cannot_fit_is_skipped_with_the_reason() -> None:
    rows = points("model.context=8192", card="Small")
    assert column(rows, "skipped") == [False, False, True]
    assert rows[-1]["micro_batch"] == 64
    assert rows[-1]["note"].endswith("a sample (predicted from the model)")
    assert not rows[-1]["recommended"]
    assert shown_points(rows)[-1]["order"] == "skipped"
    lacking = points("sweep.axes.training.precision=[fp32,bf16]")
    assert {(row["precision"], row["note"]) for row in lacking if row["skipped"]} == {
        ("bf16", "this GPU lacks bf16")
    }


def test_type_checkers_know_what_a_sweep_returns() -> None:
    found = [
        (each.__annotations__.get("card"), each.__annotations__["return"])
        for each in get_overloads(rp.sweep)
    ]
    assert found == [("None", "Run"), ("str", "pd.DataFrame")]


def test_packages_of_this_machine_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "missing_package", lambda precision: "torchao is not installed")
    rows = points("sweep.axes.training.precision=[fp8]", MICRO_BATCH, card="L4")
    assert [(row["skipped"], row["note"]) for row in rows if row["precision"] == "fp8"] == [
        (False, "fp8 is not predicted; the sweep measures it")
    ]


def test_what_has_to_be_measured_is_not_recommended() -> None:
    rows = points("sweep.kind=quality", "train.training.steps=10")
    assert not any(column(rows, "recommended"))
    assert all(hours > 0 for hours in column(rows, "hours"))
    assert "no point is recommended" in conclusion_of_points(rows)
    assert "their trainings take " in conclusion_of_points(rows)
    (least,) = [r for r in points("sweep.metric=gpu_peak_bytes") if r["recommended"]]
    assert least["micro_batch"] == 2


SEARCH = ("sweep.kind=quality", "sweep.search=optuna", "train.training.steps=10")


def test_a_search_is_predicted_where_its_space_is_finite() -> None:
    drop = "sweep.axes.training.micro_batch=null"
    finite = points(*SEARCH, drop, "sweep.axes.training.seed={choice: [0, 1]}")
    assert set(column(finite, "point")) == {f"precision=fp32 seed={seed}" for seed in (0, 1)}
    with pytest.raises(ConfigError, match=r"learning_rate: which points search = optuna draws"):
        points(*SEARCH, drop, "sweep.axes.training.learning_rate={low: 1e-4, high: 0.1}")


def test_cards_of_a_machine_are_its_workers() -> None:
    request = Request("sweep", "sweeps/lm_pretrain", SMALL)
    rows = predict_sweep(request, Wanted("Large", cards_per_node=2))
    assert set(column(rows, "workers")) == {2}
    assert max(column(rows, "micro_batch")) == 8  # a share of 64 is 32
    four = points("sweep.axes.scaling.workers=[1,4]", "sweep.axes.training.micro_batch=[2]")
    assert {(row["workers"], row["note"]) for row in four if row["skipped"]} == {
        (4, "there are only 1 GPUs for 4 workers")
    }


def test_a_run_receives_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "report", lambda location: location)
    run = RunDirectory.at(tmp_path / "run")
    Ledger(run).put_tables({"runs": {"run": {"run_id": "r"}}})
    rows = points(run_dir=str(tmp_path / "run"))
    stored = read_table(run, "card_predictions")
    assert sorted(stored["point"]) == sorted(column(rows, "point"))


def test_mistakes_are_refused_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--card all: a sweep is planned for one card"):
        points(card="all")
    with pytest.raises(ConfigError, match=r"--run-dir .*: is not a run"):
        points(run_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="has no section sweep"):
        predict_sweep(Request("sweep", "lm_pretrain"), Wanted("Large"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("script.yaml").write_text(
        "experiment: raypipe.scripts\n"
        "train:\n  command: 'python train.py {micro_batch} {accumulation} {steps}'\n"
        "  training: {steps: 10}\n"
        "sweep: {stage: train, axes: {training.micro_batch: [1, 2]}}\n"
    )
    with pytest.raises(ConfigError, match=r"script.yaml: train: another program trains"):
        predict_sweep(Request("sweep", "script.yaml"), Wanted("Large"))
    with pytest.raises(ConfigError, match="cards_per_node and cards need card"):
        rp.sweep("lm_pretrain", cards_per_node=2)  # type: ignore[call-overload]
    for options in (["--cards", "x"], ["--json"], ["--card", "L4", "--write", "x.yaml"]):
        found = CliRunner().invoke(app, ["sweep", "sweeps/lm_pretrain", *options])
        assert isinstance(found.exception, ConfigError), options


def test_the_command_prints_a_table_or_json() -> None:
    axes = "sweep.axes.training.micro_batch=[2]"
    command = ["sweep", "sweeps/lm_pretrain", *SMALL, axes, "--card", "large"]
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 0
    assert "micro_batch=2 precision=fp32" in table.stdout
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert column(rows, "recommended") == [True]
