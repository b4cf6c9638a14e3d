"""`raypipe run --local` and `raypipe logs`: failures that one can debug."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from raypipe.commands import cluster
from raypipe.commands import summary as command
from raypipe.errors import ConfigError
from raypipe.launch.cluster import RayLauncher
from raypipe.store.run_directory import RunDirectory
from tests.command import in_process
from tests.raypipe.toy import raypipe

FAILING = """
def cube(n):
    print("cubing", n)
    return 1 / (n - 2)


def run(context):
    with context.pool(PoolOptions(0.5)) as pool:
        calls = [(unit.key, cube, int(unit.key.split("/")[1])) for unit in context.todo()]
        for key, value in context.map(pool, calls):
            context.finish(key, {"evaluations": {key: {"dataset": key, "value": value}}})


def stages(settings):
    numbers = settings.squares.numbers
    units = [Unit(f"squares/{n}") for n in numbers]
    return [Stage("squares", run, units, (), ("squares.power",))]


EXPERIMENT = Experiment("toy", 1, Toy, stages)
"""


@pytest.fixture
def failing(work: Path) -> Path:
    """The directory of an experiment whose unit squares/2 divides by zero."""
    with (work / "toy.py").open("a") as file:
        file.write(FAILING)
    return work


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        pytest.fail("a local run needs no cluster")

    monkeypatch.setattr(cluster, "start", refuse)
    monkeypatch.setattr(cluster, "attach", refuse)


def test_a_failure_names_the_place_the_log_and_the_way_on(failing, no_ray, capsys):
    assert raypipe("run", "toy.yaml", "--run-dir", "out", "--local") == 1
    shown = capsys.readouterr().out
    assert "local: one process without Ray" in shown
    assert "squares/2: attempt 1: error: ZeroDivisionError: division by zero; gave up" in shown
    assert re.search(r"\n  at toy\.py:\d+ in cube\n  log: out/logs/squares-2\.log\n", shown)
    assert "failed: squares: squares/2: error: ZeroDivisionError: division by zero" in shown
    assert f"logs: raypipe logs {failing / 'out'}" in shown
    assert "continue with: raypipe run toy.yaml --run-dir" in shown
    assert "--local" in shown.splitlines()[-1]
    (failure,) = pd.read_parquet(failing / "out/results/failures").to_dict("records")
    assert failure["message"] == "ZeroDivisionError: division by zero"
    assert failure["frame"].endswith(" in cube")
    assert failure["traceback"].startswith("Traceback (most recent call last):")
    assert failure["log"] == "squares-2.log"


def test_an_error_in_a_stage_has_a_traceback(work, no_ray, capsys):
    (work / "toy.py").write_text(
        (work / "toy.py")
        .read_text()
        .replace("with context.pool", "print(1 / 0)\n        with context.pool")
    )
    assert raypipe("run", "toy.yaml", "--run-dir", "out", "--local") == 1
    assert "  at toy.py:" in capsys.readouterr().out
    (failure,) = pd.read_parquet(work / "out/results/failures").to_dict("records")
    assert failure["message"] == "ZeroDivisionError: division by zero"
    assert failure["frame"].endswith("in run")
    assert raypipe("logs", "out", "squares") == 0
    assert "print(1 / 0)" in capsys.readouterr().out


def test_logs_are_listed_and_shown(failing, no_ray, capsys):
    raypipe("run", "toy.yaml", "--run-dir", "out", "--local")
    listed = command.log_rows("out")
    assert listed == [
        {
            "unit": "squares/2",
            "status": "failed",
            "failures": 1,
            "kind": "error",
            "bytes": (failing / "out/logs/squares-2.log").stat().st_size,
            "log": "logs/squares-2.log",
        }
    ]
    texts = [
        command.log_text("out", name) for name in ("squares/2", "squares-2", "2", "squares-2.log")
    ]
    assert len(set(texts)) == 1
    assert texts[0].endswith("ZeroDivisionError: division by zero")
    (failing / "out/logs/squares-2.log").unlink()
    assert command.log_text("out", "squares/2").startswith("error: Traceback")
    assert [row["log"] for row in command.log_rows("out")] == [""]
    with pytest.raises(ConfigError, match="did you mean squares-2"):
        command.log_text("out", "sqares/2")
    with pytest.raises(ConfigError, match="is not a run directory"):
        command.log_rows("nowhere")


def test_a_name_without_the_variant_is_that_of_each_variant(run: RunDirectory, monkeypatch):
    monkeypatch.setattr(RunDirectory, "at", classmethod(lambda cls, location: run))
    run.write(f"{run.ledger}/rows", b"")
    for unit in ("train@lr=0.1", "train@lr=1", "lda@lr=1/news/tpe", "lda@lr=1/wiki/tpe"):
        run.append(run.log(unit), unit.encode())
    with pytest.raises(ConfigError, match=r"train: names several logs: train@lr=0\.1, train@lr=1$"):
        command.log_text("it", "train")
    assert command.log_text("it", "lda/news/tpe") == "lda@lr=1/news/tpe"
    with pytest.raises(ConfigError, match="did you mean train@lr=1"):
        command.log_text("it", "trane@lr=1")


def test_logs_before_the_first_table(run: RunDirectory, remote: RunDirectory, monkeypatch):
    for place in (run, remote):
        monkeypatch.setattr(RunDirectory, "at", classmethod(lambda cls, location, it=place: it))
        place.append(place.log("lda/1"), b"# lda/1\nhello\n")
        place.write(f"{place.ledger}/none", b"")
        place.delete(f"{place.ledger}/none")
        monkeypatch.setattr(RunDirectory, "check", lambda self: None)
        assert command.log_text("it", "lda/1") == "# lda/1\nhello"
        assert [row["status"] for row in command.log_rows("it")] == ["printed"]


def test_settings_that_one_process_does_not_follow_are_named(work, no_ray, capsys):
    words = ("train.scaling.workers=2", "train.loader.workers=3")
    assert raypipe("run", "toy.yaml", *words, "--run-dir", "out", "--local") == 0
    line = (
        "train.scaling.workers = 2: 1, with the same effective batch; train.loader.workers = 3: 0"
    )
    assert f"local: not followed: {line}" in capsys.readouterr().out


def test_a_run_continues_with_and_without_ray(work, launcher: RayLauncher):
    """Prove equal identities and rows: what one stored, the other neither refuses nor repeats."""

    def ended(folder: str, *words: str) -> tuple[int, str]:
        given = ("run", "toy.yaml", *words, "--run-dir", folder)
        done = in_process(launcher, *given, environment={})
        return done.status, done.output

    some, more = "squares.numbers=[3,4]", "squares.numbers=[3,4,5,6]"
    for folder, words in (("local", ["--local"]), ("ray", [])):
        status, output = ended(folder, some, *words)
        assert status == 0, output
    assert "nothing to do" in ended("local", some)[1]
    assert "nothing to do" in ended("ray", some, "--local")[1]
    assert ended("local", more)[0] == 0
    assert ended("ray", more, "--local")[0] == 0
    columns = ["dataset", "value"]
    local, ray = (
        pd.read_parquet(work / name / "results" / "evaluations")[columns].sort_values("dataset")
        for name in ("local", "ray")
    )
    pd.testing.assert_frame_equal(local.reset_index(drop=True), ray.reset_index(drop=True))
    assert len(local) == 4
