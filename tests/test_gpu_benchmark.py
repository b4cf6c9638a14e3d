"""``benchmarks.gpu``: order, continuation and page; its rehearsal is slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import gpu
from benchmarks.gpu_parts import bench as benches
from benchmarks.gpu_parts import memory, training
from benchmarks.gpu_parts.bench import Bench, Machine, Row, read_rows
from benchmarks.gpu_parts.parts import PARTS, Part
from raypipe.commands.configuration import read, resolve
from raypipe.hardware import Gpu, Hardware
from tests.command import is_alive, until
from tests.scenario import cases

H100 = Machine("NVIDIA H100", 1, "GPU-1", 85 * 10**9, "9.0", "580.65", "2.13.0", "abc", False)
CPU = replace(H100, device="cpu", gpus=0, driver=None, capability=None, rehearsal=True)


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def bench_of(folder: Path, machine: Machine = H100, part: str = "mfu") -> Bench:
    return Bench(machine, part, folder / "work", folder / "out", quick=False)


def three_rows(bench: Bench, then: str) -> None:
    bench.measure("a", lambda: {"case": 1})
    bench.measure("b", lambda: [{"case": 2}, {"case": 3}])
    if then == "failed":
        sys.exit(3)
    elif then == "timed out":
        time.sleep(99)
    bench.measure("c", lambda: {"case": 1 // 0})


@pytest.mark.slow  # the process of a part loads torch
@pytest.mark.parametrize(
    ("rows", "status", "note"),
    [
        (4, "done", "1 of 4 rows have an error"),
        (3, "failed", "exit status 3; the error is in the output above"),
        (3, "timed out", "after 2 s; the same command continues it"),
    ],
)
def test_rows_of_a_part_survive_its_process(tmp_path, rows, status, note) -> None:
    bench = bench_of(tmp_path, CPU, "own")
    part = Part("own", "Own", partial(three_rows, then=status), 60, 60)
    assert gpu.run_part(part, bench, 2 if status == "timed out" else 60) == (status, note)
    assert len(read_rows(bench.out, "own")) == rows


def test_a_part_goes_on_after_its_last_row(tmp_path: Path) -> None:
    """Cases are measured once, in their order; one that failed is measured again."""
    bench, calls = bench_of(tmp_path), []

    def case(name: str, *rows: Row) -> None:
        bench.measure(name, lambda: calls.append(name) or list(rows))  # type: ignore[func-returns-value]

    case("a", {"value": 1}, {"value": 2})
    case("b", {"error": "full"})
    case("a", {"value": 9})
    case("c", {"value": 3})
    case("b", {"value": 4})
    assert calls == ["a", "b", "c", "b"]
    rows = read_rows(bench.out, bench.part)
    assert [row["value"] for row in rows] == [1, 2, 4, 3]
    assert rows[0]["device"] == "NVIDIA H100"


def leaves_a_process(bench: Bench) -> None:
    left = subprocess.Popen(["sleep", "60"])
    (bench.folder / "pid").write_text(str(left.pid))
    time.sleep(60)


@pytest.mark.slow
def test_no_process_of_a_part_outlives_the_command(tmp_path: Path) -> None:
    """As after SIGTERM, which a job's time limit sends to the command alone."""
    bench = bench_of(tmp_path, CPU, "own")
    file = bench.folder / "pid"

    def interrupt() -> None:
        until(lambda: file.exists() and file.read_text(), "a process of the part")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    signal.signal(signal.SIGTERM, gpu.interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        gpu.run_part(Part("own", "Own", leaves_a_process, 60, 60), bench, 50)
    thread.join()
    assert not is_alive(int(file.read_text()))


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(gpu.main)
    return app


def machine_with(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    found = Hardware("host", 2, 2**30, gpus, driver="580.65", gpu_note="no NVIDIA driver")
    monkeypatch.setattr("benchmarks.gpu_parts.bench.detect", lambda: found)
    monkeypatch.setattr(gpu, "detect", lambda: found)


@pytest.mark.parametrize(("given", "card", "reason"), cases(__file__, "gpu_refusals"))
def test_measurements_are_not_mixed_and_need_a_gpu(tmp_path, monkeypatch, given, card, reason):
    monkeypatch.chdir(gpu.PROJECT)  # a folder in the table is relative
    machine_with(monkeypatch, *([Gpu(0, "GPU-1", card, 85 * 10**9, "9.0")] if card else []))
    done = {"part": "losses", "status": "done", "quick": False, **H100.columns}
    benches.write_rows(tmp_path, gpu.OUTCOMES, [done])
    ended = CliRunner().invoke(command(), ["--out", str(tmp_path), *given.split()])
    assert ended.exit_code == 2
    assert ended.output.startswith("benchmarks.gpu: ")
    assert reason in ended.output


def test_the_same_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, Gpu(0, "GPU-1", "NVIDIA H100", 85 * 10**9, "9.0"))
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    tried: list[str] = []
    failing = {"mfu"}

    def run_part(part: Part, bench: Bench, seconds: float) -> tuple[str, str]:
        tried.append(part.name)
        assert 0 < seconds <= part.seconds
        assert bench.folder == tmp_path / "work" / "nvidia-h100" / part.name
        if part.name in failing:
            bench.put("a", {"compile": True, "mfu": 0.4, "gpu_peak_bytes": 2**30})
            return "timed out", "after 1 s"
        bench.put("a", {"case": "a", "as_predicted": True, "precision": "fp32"})
        return "done", ""

    monkeypatch.setattr(gpu, "run_part", run_part)
    out = tmp_path / "out"
    names = [part.name for part in PARTS if part.gpus == 1]
    assert CliRunner().invoke(command(), ["--out", str(out)]).exit_code == 1
    assert tried == names
    page = (out / "results.md").read_text()
    assert "| MFU of the medium language model | timed out |" in page
    assert "Measured: 40 % of the data sheet's peak, " in page

    tried.clear()
    failing.clear()
    assert CliRunner().invoke(command(), ["--out", str(out)]).exit_code == 0
    assert tried == ["mfu"]
    outcomes = {row["part"]: row["status"] for row in read_rows(out, gpu.OUTCOMES)}
    assert list(outcomes) == [part.name for part in PARTS]
    assert outcomes["two_cards"] == "skipped"
    row = read_rows(out, "losses")[0]
    assert (row["device"], row["driver"], row["rehearsal"]) == ("NVIDIA H100", "580.65", False)
    assert {"torch", "commit", "at"} <= set(row)

    tried.clear()
    other = ["--out", str(tmp_path / "other"), "--minutes", "0"]
    assert CliRunner().invoke(command(), other).exit_code == 1
    assert tried == []
    assert "no time was left" in (tmp_path / "other" / "results.md").read_text()


def test_a_measurement_lies_next_to_its_prediction() -> None:
    speed = {"samples_per_s": 40.0, "samples_per_s_low": 20.0, "samples_per_s_high": 60.0}
    predicted = {"peak_bytes": 1300, **speed}
    trial = {"gpu_peak_bytes": 1430, "samples_per_s": 30.0, "status": "succeeded"}
    found = memory.compared(predicted, benches.Trained("run", trial))
    assert found["peak_ratio"] == pytest.approx(1.1)
    assert found["speed_ratio"] == 0.75
    assert found["speed_within_interval"]
    nothing = memory.compared(predicted, benches.Trained("run", {"status": "failed"}, error="full"))
    assert (nothing["peak_ratio"], nothing["error"]) == (None, "full")


def test_losses_are_compared_step_by_step_within_a_phase() -> None:
    def steps(losses: Sequence[float | None]) -> list[Row]:
        return [
            {"step": n, "phase": "a" if n < 2 else "b", "loss": loss}
            for n, loss in enumerate(losses)
        ]

    reference = [{"losses": {"0": 2.0, "1": 4.0}}, {"losses": {"2": 4.0}}]
    found = training.differences(steps([2.2, None, 3.0]), reference)
    assert found == {
        "a": ({"0": 2.2, "1": None}, [pytest.approx(0.1)]),
        "b": ({"2": 3.0}, [0.25]),
    }
    assert training.differences(steps([2.0]), []) == {"a": ({"0": 2.0}, [0.0])}
    assert training.differences([], reference) == {"": ({}, [])}


def test_what_nvidia_smi_prints_is_read() -> None:
    rows = [training.parse_smi(line) for line in ("97, 1024, 310.5\n", "[N/A], 2048, [N/A]\n", "")]
    assert rows[1] == {"util": None, "memory_bytes": 2 * 2**30, "power_w": None}
    assert training.summary(rows) == {
        "samples": 3, "gpu_util_mean": 97, "power_w_mean": 310.5, "memory_max_bytes": 2 * 2**30
    }  # fmt: skip


@pytest.mark.parametrize("rehearsal", [False, True])
@pytest.mark.parametrize("name", benches.WORKLOADS)
def test_the_overrides_of_a_workload_are_valid(name: str, rehearsal: bool) -> None:
    bench = bench_of(Path("unused"), CPU if rehearsal else H100)
    workload = benches.WORKLOADS[name]
    gpus = () if rehearsal else (Gpu(0, "", "NVIDIA H100", 85 * 10**9, "9.0"),)
    given = bench.overrides(name, {"training.precision": bench.precision(name)})
    texts = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    settings = resolve(read(workload.config), texts, "auto", [Hardware("h", 2, 1, gpus)]).settings
    assert getattr(settings, workload.stage).scaling.workers == 1


@pytest.mark.slow
def test_the_rehearsal_finishes_every_part(tmp_path: Path) -> None:
    given = ["--quick", "--rehearse", "--minutes", "9", "--out", str(tmp_path)]
    ended = CliRunner().invoke(command(), given)
    assert ended.exit_code == 0, ended.output
    outcomes = {row["part"]: row["status"] for row in read_rows(tmp_path, gpu.OUTCOMES)}
    assert outcomes == {part.name: "done" for part in PARTS}
    rows = read_rows(tmp_path, "out_of_memory")
    assert [row["found"] for row in rows] == ["fits", "runs out"]
    assert {row["rehearsal"] for row in rows} == {True}
    assert (tmp_path / "results.md").read_text().startswith("# Rehearsal on the CPU")
