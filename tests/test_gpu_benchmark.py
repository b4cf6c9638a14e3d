"""``benchmarks.gpu``: order, continuation and page; its rehearsal is slow."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import gpu
from benchmarks.gpu_parts import memory, training
from benchmarks.gpu_parts.bench import WORKLOADS, Bench, Machine, Row, Trained
from benchmarks.gpu_parts.child import ROWS
from benchmarks.gpu_parts.page import page
from benchmarks.gpu_parts.parts import PARTS, Part
from raypipe.commands.configuration import read, resolve
from raypipe.hardware import Gpu, Hardware
from raypipe.prediction import calibration

H100 = Machine("NVIDIA H100", 1, "GPU-1", 85 * 10**9, "9.0", "580.65", "2.13.0", "abc", False)
CPU = replace(H100, device="cpu", gpus=0, driver=None, capability=None, rehearsal=True)
ONE_CARD = [part for part in PARTS if part.gpus == 1]
PREDICTION = {
    "micro_batch": 10, "accumulation": 2, "effective_batch": 20, "precision": "bf16",
    "compile": False, "peak_bytes": 1300, "parameters_bytes": 100, "gradients_bytes": 100,
    "optimizer_bytes": 100, "context_bytes": 200, "capacity_bytes": 2000, "measurements": 0,
    "step_time_s": 0.5, "samples_per_s": 40.0, "samples_per_s_low": 20.0,
    "samples_per_s_high": 60.0, "mfu": 0.3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def outcome(part: str, status: str, machine: Machine = H100, **more: Any) -> Row:
    return {
        "part": part, "status": status, "note": "", "duration_s": 61.0, **machine.columns, **more
    }  # fmt: skip


def test_the_parts_for_one_card_take_less_than_half_an_hour() -> None:
    assert sum(part.seconds for part in ONE_CARD) < 30 * 60
    assert [part.name for part in PARTS][:4] == ["losses", "out_of_memory", "predictions", "mfu"]


@pytest.mark.parametrize(
    ("name", "machine", "reason"),
    [
        ("two_cards", H100, "needs 2 GPUs; this machine has 1"),
        ("two_cards", replace(H100, gpus=2), None),
        ("telemetry", CPU, "needs a GPU"),
        ("two_cards", CPU, None),
        ("losses", H100, None),
    ],
)
def test_a_part_that_cannot_run_says_why(name: str, machine: Machine, reason: str | None) -> None:
    (part,) = (part for part in PARTS if part.name == name)
    assert part.obstacle(machine) == reason


def test_only_finished_parts_are_not_tried_again() -> None:
    statuses = ("done", "failed", "timed out", "skipped", "not started")
    parts, outcomes = PARTS[:6], [outcome(p.name, s) for p, s in zip(PARTS, statuses, strict=False)]
    assert gpu.to_do(parts, outcomes, again=False) == list(PARTS[1:6])
    assert gpu.to_do(parts, outcomes, again=True) == list(parts)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (H100, None),
        (replace(H100, device="A100"), "is of NVIDIA H100, and this is A100"),
        (CPU, "is not of a rehearsal"),
    ],
)
def test_results_of_other_machines_are_not_mixed(machine: Machine, reason: str | None) -> None:
    assert gpu.foreign([outcome("losses", "done")], machine) == reason


WRITES = """
import json, sys, time
with open({file!r}, "w") as file:
    for row in {rows}:
        print(json.dumps(row), file=file, flush=True)
    file.write('{{"torn": ')
{end}
"""


@pytest.mark.parametrize(
    ("rows", "end", "status", "note"),
    [
        ([{"a": 1}], "", "done", ""),
        ([{"a": 1}, {"error": "no"}], "", "done", "1 of 2 rows have an error"),
        ([{"error": "no"}], "", "failed", "no"),
        ([], "", "failed", "there are no rows"),
        ([{"a": 1}], "sys.exit(3)", "failed", "exit status 3; the error is in the output above"),
        ([{"a": 1}], "time.sleep(99)", "timed out", "after 1 s; the same command continues it"),
    ],
)
def test_rows_of_a_part_survive_its_process(
    tmp_path: Path, rows: list[Row], end: str, status: str, note: str
) -> None:
    script = WRITES.format(file=str(tmp_path / ROWS), rows=rows, end=end)
    seconds = 1 if status == "timed out" else 60
    found = gpu.collect([sys.executable, "-c", script], tmp_path, {}, seconds)
    assert found == (status, note, rows)


LEAVES = """
import subprocess, time
from pathlib import Path
left = subprocess.Popen(["sleep", "60"])
Path({file!r}).write_text(str(left.pid))
time.sleep(60)
"""


def test_no_process_of_a_part_outlives_the_command(
    tmp_path: Path,
) -> None:
    """As after SIGTERM, which a job's time limit sends to the command alone."""
    file = tmp_path / "pid"

    def interrupt() -> None:
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    script = LEAVES.format(file=str(file))
    thread = threading.Thread(target=interrupt)
    signal.signal(signal.SIGTERM, gpu.interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        gpu.collect([sys.executable, "-c", script], tmp_path, {}, 50)
    thread.join()
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(gpu.main)
    return app


def machine_with(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    found = Hardware("host", 2, 2**30, gpus, driver="580.65", gpu_note="no NVIDIA driver")
    monkeypatch.setattr("benchmarks.gpu_parts.bench.detect", lambda: found)
    monkeypatch.setattr(gpu, "detect", lambda: found)


def test_without_a_gpu_one_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch)
    ended = CliRunner().invoke(command(), [])
    assert ended.exit_code == 2
    assert ended.output == (
        "benchmarks.gpu: no GPU can be used here: no NVIDIA driver; rehearse on the CPU with "
        "--rehearse\n"
    )


def test_a_rehearsal_does_not_touch_the_committed_results() -> None:
    given = ["--rehearse", "--out", str(gpu.RESULTS / "h100")]
    ended = CliRunner().invoke(command(), given)
    assert ended.exit_code == 2
    assert "is for measurements on GPUs" in ended.output


def test_the_same_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, Gpu(0, "GPU-1", "NVIDIA H100", 85 * 10**9, "9.0"))
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    tried: list[str] = []
    failing = {"mfu"}

    def run_part(part: Part, bench: Bench, seconds: float) -> tuple[str, str, list[Row]]:
        tried.append(part.name)
        assert 0 < seconds <= part.seconds
        assert bench.folder == tmp_path / "work" / "nvidia-h100" / part.name
        if part.name in failing:
            return (
                "timed out",
                "after 1 s",
                [{"compile": True, "mfu": 0.4, "gpu_peak_bytes": 2**30}],
            )
        return "done", "", [{"case": "a", "as_predicted": True, "precision": "fp32"}]

    monkeypatch.setattr(gpu, "run_part", run_part)
    out = tmp_path / "out"
    names = [part.name for part in ONE_CARD]
    assert CliRunner().invoke(command(), ["--out", str(out)]).exit_code == 1
    assert tried == names
    page = (out / "results.md").read_text()
    assert "| MFU of the medium language model | timed out |" in page
    assert "Measured: 40 %, 1.0 GiB." in page

    tried.clear()
    failing.clear()
    assert CliRunner().invoke(command(), ["--out", str(out)]).exit_code == 0
    assert tried == ["mfu"]
    outcomes = pd.read_parquet(out / "parts.parquet").set_index("part")
    assert list(outcomes.index) == [part.name for part in PARTS]
    assert outcomes.status["two_cards"] == "skipped"
    row = pd.read_parquet(out / "losses.parquet").iloc[0]
    assert (row.device, row.driver, row.rehearsal) == ("NVIDIA H100", "580.65", False)
    assert {"torch", "commit", "at"} <= set(row.index)

    tried.clear()
    other = ["--out", str(tmp_path / "other"), "--minutes", "0"]
    assert CliRunner().invoke(command(), other).exit_code == 1
    assert tried == []
    assert "no time was left" in (tmp_path / "other" / "results.md").read_text()


def test_measuring_again_without_time_keeps_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of finished parts, and trainings of a part that continues."""
    machine_with(monkeypatch, Gpu(0, "GPU-1", "NVIDIA H100", 85 * 10**9, "9.0"))
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    here = Machine.here(rehearsal=False)
    before = [outcome("mfu", "timed out", here), outcome("two_cards", "done", here)]
    gpu.store(tmp_path, gpu.OUTCOMES, before)
    training = tmp_path / "work" / "nvidia-h100" / "mfu"
    training.mkdir(parents=True)
    given = ["--out", str(tmp_path), "--again", "--minutes", "0"]
    given += ["--only", "mfu", "--only", "two_cards"]
    ended = CliRunner().invoke(command(), given)
    assert ended.exit_code == 1
    assert "== mfu: not started, no time was left" in ended.output
    assert "this machine has 1; its results are kept" in ended.output
    assert training.exists()
    assert gpu.stored(tmp_path, gpu.OUTCOMES) == before


def test_the_page_of_a_rehearsal_says_so_first() -> None:
    assert page([outcome("mfu", "done", CPU)], {}).splitlines()[0] == (
        "# Rehearsal on the CPU: nothing on this page is a measurement of a GPU"
    )


def test_the_page_shows_rows_verdicts_and_errors() -> None:
    common = {"workload": "lm", "phase": "train", "difference_mean": 0.001, "error": None}
    losses = [
        {**common, "precision": "fp32", "difference_max": 0.0},
        {**common, "precision": "bf16", "difference_max": 0.004, "skipped_steps": float("nan")},
        {**common, "precision": "fp16", "difference_max": None, "error": "it | overflowed"},
    ]
    text = page([outcome("losses", "done")], {"losses": losses})
    assert text.startswith("# GPU benchmarks: NVIDIA H100\n")
    assert "to fp32: bf16 0.4 %." in text
    assert "| lm | train | bf16 | 0.4 % | 0.1 % |\n" in text
    assert "Not measured: it / overflowed" in text
    assert "| Losses of each precision next to fp32 | done | 1 min 01 s |" in text
    assert "| A sweep by the command | not started |" in text


def test_the_limit_lies_on_the_line_through_the_prediction() -> None:
    assert memory.peak_at(PREDICTION, 5) == 800
    assert memory.first_too_large(PREDICTION) == 16  # 300 + 100 x 16 > 2000 - 200
    assert memory.peak_at(PREDICTION, 15) == 1800


def test_a_precision_in_which_no_sample_fits_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {**PREDICTION, "micro_batch": None, "note": "micro-batch 1 does not fit; predicted"}
    monkeypatch.setattr(Bench, "predict", lambda *_: {"bf16": PREDICTION, "fp32": full})
    monkeypatch.setattr(Bench, "train", lambda *_: Trained("run", {"status": "succeeded"}))
    rows = list(memory.out_of_memory(Bench(H100, tmp_path)))
    assert [row.get("micro_batch") for row in rows] == [10, 16, None]
    assert rows[2]["error"] == "fp32: micro-batch 1 does not fit; predicted"
    gpu.store(tmp_path, "out_of_memory", rows)
    stored = gpu.stored(tmp_path, "out_of_memory")
    text = page([outcome("out_of_memory", "done")], {"out_of_memory": stored})
    assert "1 of 2 trainings ended as predicted." in text
    assert "Not measured: fp32: micro-batch 1 does not fit; predicted" in text
    assert "0 of 0" in page([outcome("out_of_memory", "done")], {"out_of_memory": rows[2:]})


def test_a_card_without_bf16_is_tried_at_its_limit_in_fp32_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "predict", lambda *_: {"fp32": PREDICTION})
    monkeypatch.setattr(Bench, "train", lambda *_: Trained("run", {"status": "succeeded"}))
    turing = replace(H100, device="Tesla T4", capability="7.5")
    rows = list(memory.out_of_memory(Bench(turing, tmp_path)))
    assert [(row["precision"], row["micro_batch"]) for row in rows] == [("fp32", 10), ("fp32", 16)]


def test_a_measurement_lies_next_to_its_prediction() -> None:
    trial = {"gpu_peak_bytes": 1430, "samples_per_s": 30.0, "status": "succeeded"}
    found = memory.compared(PREDICTION, Trained("run", trial))
    assert found["peak_ratio"] == pytest.approx(1.1)
    assert found["speed_ratio"] == 0.75
    assert found["speed_within_interval"]
    nothing = memory.compared(PREDICTION, Trained("run", {"status": "failed"}, error="full"))
    assert (nothing["peak_ratio"], nothing["speed_within_interval"]) == (None, None)
    assert nothing["error"] == "full"


def test_losses_are_compared_step_by_step_within_a_phase() -> None:
    def steps(losses: Sequence[float | None]) -> list[Row]:
        return [
            {"step": n, "phase": "a" if n < 2 else "b", "loss": loss}
            for n, loss in enumerate(losses)
        ]

    found = training.differences(steps([2.2, None, 3.0]), steps([2.0, 4.0, 4.0]))
    assert found == {"a": ([2.2, None], [pytest.approx(0.1)]), "b": ([3.0], [0.25])}
    assert training.differences([], steps([1.0])) == {"": ([], [])}


def test_what_nvidia_smi_prints_is_read() -> None:
    rows = [training.parse_smi(line) for line in ("97, 1024, 310.5\n", "[N/A], 2048, [N/A]\n", "")]
    assert rows[1] == {"util": None, "memory_bytes": 2 * 2**30, "power_w": None}
    assert training.summary(rows) == {
        "samples": 3, "gpu_util_mean": 97, "power_w_mean": 310.5, "memory_max_bytes": 2 * 2**30
    }  # fmt: skip


def test_no_earlier_measurement_calibrates_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one of another part, nor one of an earlier try."""
    found = []

    def collect(
        command: Sequence[str], folder: Path, environment: dict[str, str], seconds: float
    ) -> tuple[str, str, list[Row]]:
        del command, folder, seconds
        found.append(environment["RAYPIPE_CACHE"])
        return "done", "", []

    monkeypatch.setattr(gpu, "collect", collect)
    benches = [Bench(H100, tmp_path / part.name) for part in PARTS[:3]]
    for part, bench in zip(PARTS, benches, strict=False):
        gpu.run_part(part, bench, 60)
    assert found == [str(bench.cache) for bench in benches]
    assert len(set(found)) == 3

    monkeypatch.setenv("RAYPIPE_CACHE", found[2])
    calibration.save("Card", [calibration.Measured(key="earlier", speed=2.0)])
    assert calibration.load("Card").number == 1
    monkeypatch.setattr(Bench, "predict", lambda *_: {"bf16": PREDICTION})
    monkeypatch.setattr(Bench, "train", lambda *_: Trained("run", {"status": "succeeded"}))
    next(memory.predictions(benches[2]))
    assert calibration.load("Card").number == 0


@pytest.mark.parametrize("rehearsal", [False, True])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_overrides_of_a_workload_are_valid(name: str, rehearsal: bool) -> None:
    bench = Bench(CPU if rehearsal else H100, Path("unused"))
    workload = WORKLOADS[name]
    gpus = () if rehearsal else (Gpu(0, "", "NVIDIA H100", 85 * 10**9, "9.0"),)
    given = bench.overrides(name, {"training.precision": bench.precision(name)})
    texts = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    settings = resolve(read(workload.config), texts, "auto", [Hardware("h", 2, 1, gpus)]).settings
    assert getattr(settings, workload.stage).scaling.workers == 1


def test_a_fault_is_injected_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPIPE_FAULTS", raising=False)

    def variables() -> Iterator[str | None]:
        with memory.fault("oom:micro_batch>3"):
            yield os.environ["RAYPIPE_FAULTS"]
        yield os.environ.get("RAYPIPE_FAULTS")

    assert list(variables()) == ["oom:micro_batch>3", None]


@pytest.mark.slow
def test_the_rehearsal_finishes_every_part(tmp_path: Path) -> None:
    ended = CliRunner().invoke(command(), ["--rehearse", "--out", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    outcomes = pd.read_parquet(tmp_path / "parts.parquet").set_index("part").status
    assert outcomes.pop("telemetry") == "skipped"
    assert set(outcomes) == {"done"}
    found = pd.read_parquet(tmp_path / "out_of_memory.parquet")
    assert list(found.found) == ["fits", "runs out"]
    assert set(found.rehearsal) == {True}
    assert (tmp_path / "results.md").read_text().startswith("# Rehearsal on the CPU")
