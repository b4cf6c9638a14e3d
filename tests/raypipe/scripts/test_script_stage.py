"""A script as a stage, through the commands, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import Ended
from tests.raypipe.scripts.conftest import COMMAND, SCRIPT

Run = Callable[..., Ended]


def cases(name: str) -> list[Any]:
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())


def table(folder: Path, name: str) -> pd.DataFrame:
    return read_table(RunDirectory.at(folder / "run"), name)


def log(folder: Path) -> str:
    return (folder / "run/logs/train.log").read_text()


def trial(folder: Path) -> pd.Series[Any]:
    (_, row), *rest = table(folder, "trials").iterrows()
    assert rest == []
    return row


def test_metrics_become_rows_and_output_is_kept(raypipe: Run, folder: Path) -> None:
    ended = raypipe("run")
    assert ended.status == 0, ended.output
    row = trial(folder)
    assert (row.status, row.steps, row.attempts, row.device) == ("succeeded", 12, 1, "cpu")
    assert (row.micro_batch, row.accumulation, row.effective_batch) == (4, 2, 8)
    assert row.eval_accuracy == 0.75
    assert row.samples_per_s > 0
    assert row.learning_rate == 1e-3
    assert pd.isna(row.optimizer)  # no value that the script does not receive
    assert pd.isna(row.precision)
    steps = table(folder, "steps").sort_values("step")
    assert list(steps.step) == list(range(1, 13))
    written = (folder / "run/artifacts/train/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in written[:-1]]
    assert list(steps.loss) == losses
    assert row.loss_final == losses[-1]
    assert float((folder / "run/artifacts/train/model.txt").read_text()) > 1
    assert "attempt 1: python train.py --batch 4" in log(folder)
    samples = table(folder, "gpu_samples")
    assert (samples.rss_bytes >= 0).all()


def test_out_of_memory_halves_the_micro_batch(raypipe: Run, folder: Path) -> None:
    ended = raypipe("run", extra="--fits 1")
    assert ended.status == 0, ended.output
    row = trial(folder)
    assert (row.micro_batch, row.accumulation, row.effective_batch) == (1, 8, 8)
    failures = table(folder, "failures")
    assert list(failures.kind) == ["out_of_memory"] * 2
    assert failures.message.str.contains("Tried to allocate 2.00 GiB").all()
    assert row.attempts == 3


@pytest.mark.parametrize(
    ("extra", "train", "kind", "message"),
    [
        ("--fail raise", {}, "error", "exit status 1: ValueError: the data ends here\n"),
        ("--fail nan", {}, "invalid_value", "the loss of the script is nan at step "),
        ("--fail hang", {"time_limit_s": 1.5}, "timeout", "it ran longer than time_limit_s = 1.5"),
        ("", {"metrics": "log.csv"}, "error", "metrics = log.csv: no such file in {output_dir}"),
        (
            *("", {"command": COMMAND.replace("python", "no-such-program")}, "error"),
            "ValueError: no-such-program: cannot be started: No such file or directory",
        ),
        (
            *("", {"command": COMMAND.replace("--accum {accumulation}", "--fits 1")}),
            *("out_of_memory", "exit status 1: torch.OutOfMemoryError: CUDA out of memory."),
        ),
    ],
)
def test_a_failure_has_its_kind_and_says_what_happened(
    raypipe: Run, folder: Path, extra: str, train: dict[str, Any], kind: str, message: str
) -> None:
    ended = raypipe("run", extra=extra, training={"accumulation": 1}, **train)
    assert ended.status == 1
    (row,) = table(folder, "failures").to_dict("records")
    assert row["kind"] == kind
    assert row["message"].startswith(message)
    assert message.strip() in ended.output
    assert trial(folder).status == ("out_of_memory" if kind == "out_of_memory" else "failed")


@pytest.mark.parametrize(
    ("changed", "sizes", "named"),
    [
        ("train.py", {}, "files.train.py"),
        ("model.py", {}, "files.model.py"),
        (None, {"micro_batch": 8}, "train.training.effective_batch"),
        (None, {"micro_batch": 8, "accumulation": 1}, None),
    ],
)
def test_a_changed_file_or_value_is_refused_and_another_split_is_not(
    raypipe: Run, folder: Path, changed: str | None, sizes: dict[str, int], named: str | None
) -> None:
    (folder / "model.py").touch()
    (folder / "train.py").write_text(f"import model\n{SCRIPT}")
    assert raypipe("run").status == 0
    if changed is not None:
        (folder / changed).open("a").write("# changed\n")
    ended = raypipe("run", training=sizes, time_limit_s=99)
    assert ended.status == (2 if named else 0)
    assert (named or "nothing to do") in ended.output
    assert trial(folder).micro_batch == 4


def test_a_killed_script_resumes_from_its_checkpoint(raypipe: Run, folder: Path) -> None:
    assert raypipe("run").status == 0
    expected = table(folder, "steps").sort_values("step").loss.tolist()
    (folder / "run").rename(folder / "whole")
    ended = raypipe("run", extra="--fail kill")
    assert ended.status == 0, ended.output
    (failure,) = table(folder, "failures").to_dict("records")
    assert failure["kind"] == "worker_died"
    assert "SIGKILL" in failure["message"]
    steps = table(folder, "steps").sort_values("step")
    assert list(steps.step) == list(range(1, 13))
    assert steps.loss.tolist() == expected
    first, second = [x for x in log(folder).splitlines() if x.startswith("---")]
    assert "--resume" not in first
    assert "--resume" in second
    assert trial(folder).attempts == 2


def test_values_arrive_as_variables_and_json_comes_on_stdout(raypipe: Run, folder: Path) -> None:
    (folder / "other.py").write_text(
        "import json, os\n"
        "lr, hidden = os.environ['RAYPIPE_LEARNING_RATE'], os.environ['RAYPIPE_HIDDEN']\n"
        "print('hello')\n"
        "print(json.dumps({'step': 1, 'loss': float(lr), 'hidden': int(hidden)}))\n"
        "print(json.dumps({'accuracy': 1.0, 'visible': len(os.environ['CUDA_VISIBLE_DEVICES'])}))\n"
    )
    training = {"steps": None, "epochs": None, "micro_batch": 1, "accumulation": 1}
    training["learning_rate"] = 0.5
    ended = raypipe(
        "run",
        command="python other.py",
        metrics="stdout",
        training=training,
        parameters={"hidden": 32},
    )
    assert ended.status == 0, ended.output
    row = trial(folder)
    assert (row.loss_final, row.hidden, row.param_hidden) == (0.5, 32, 32)
    assert (row.accuracy, row.visible) == (1.0, 0)
    assert "hello" in log(folder)


def test_a_shell_receives_values_as_they_are(raypipe: Run, folder: Path) -> None:
    (folder / "note.sh").write_text('printf \'{"step": 1, "loss": %s}\\n\' "$1"\necho "$2"\n')
    text = "two  words; $(exit 3) 'quoted'"
    for command in ("{text}", '"$RAYPIPE_TEXT"'):
        ended = raypipe(
            *("run", f"--run-dir=run{len(command)}"),
            command=f"x=0.25; sh note.sh $x {command} | cat",
            shell=True,
            metrics="stdout",
            training={"steps": None, "micro_batch": 1, "accumulation": 1},
            parameters={"text": text},
        )
        assert ended.status == 0, ended.output
        assert text in (folder / f"run{len(command)}/logs/train.log").read_text().splitlines()


@pytest.mark.parametrize("case", cases("metrics"), ids=lambda case: case["name"])
def test_what_a_script_writes_becomes_rows(raypipe: Run, folder: Path, case: Any) -> None:
    name, text, warning = case["file"], case["text"], case.get("warning")
    (folder / "write.py").write_text(
        "import sys\n"
        f"out = sys.stdout if {name!r} == 'stdout' else open(sys.argv[2] + {f'/{name}'!r}, 'w')\n"
        "out.reconfigure(encoding='utf-8', newline='')\n"
        f"print({text!r}, end='', file=out, flush=True)\n"
    )
    command = "python write.py {micro_batch} {output_dir} {accumulation} {steps}"
    ended = raypipe("run", command=command, metrics=name)
    if "failure" in case:
        assert ended.status == 1
        assert case["failure"] in table(folder, "failures").message.iloc[0]
        return
    assert ended.status == 0, ended.output
    assert ended.output.count(f"WARNING: train: metrics = {name}: ") == (warning is not None)
    assert (warning or "") in ended.output
    rows = table(folder, "steps").to_dict("records")
    rows = sorted(rows, key=lambda row: row["step"])
    for row, expected in zip(rows, case.get("steps", rows), strict=True):
        assert {key: row[key] for key in expected} == expected
    last, expected = trial(folder), case.get("trial", {})
    assert {key: None if pd.isna(last[key]) else last[key] for key in expected} == expected


@pytest.mark.parametrize("metric", [{"metric": "eval_accuracy"}, {}])
def test_a_sweep_recommends_the_trial_whose_evaluation_stays_finite(
    raypipe: Run, folder: Path, metric: dict[str, str]
) -> None:
    (folder / "rate.py").write_text(
        "import json, sys\n"
        "rate = float(sys.argv[1])\n"
        "for step in (1, 2, 3):\n"
        "    accuracy = 0.8 if rate < 0.5 else 0.9 if step == 2 else float('nan')\n"
        "    print(json.dumps({'step': step, 'loss': 1 - rate, 'eval_accuracy': accuracy}))\n"
    )
    axes = {"training.learning_rate": [0.9, 0.1]}
    ended = raypipe(
        "sweep",
        command="python rate.py {learning_rate} {steps} {micro_batch} {accumulation}",
        metrics="stdout",
        sweep={"stage": "train", "kind": "quality", "axes": axes, **metric},
    )
    assert ended.status == 0, ended.output
    assert "recommended: learning_rate=0.1" in ended.output
    assert "eval_accuracy 0.8" in ended.output


@pytest.mark.parametrize("case", cases("mistakes"), ids=lambda case: case["message"])
def test_a_mistake_is_one_message(raypipe: Run, folder: Path, case: Any) -> None:
    ended = raypipe("run", **case["given"])
    assert ended.status == 2, ended.output
    assert case["message"] in ended.output
    assert "Traceback" not in ended.output
    assert not (folder / "run").exists()


def test_a_sweep_tries_parameters_and_does_not_retry(raypipe: Run, folder: Path) -> None:
    ended = raypipe(
        "sweep",
        extra="--pause 0.05 --fits {fits} --precision {precision}",
        parameters={"fits": 4},
        sweep={
            "stage": "train",
            "steps": 8,
            "warmup_steps": 2,
            "repeats": 1,
            "axes": {"training.micro_batch": [2, 8], "parameters.fits": [4]},
        },
    )
    assert ended.status in (0, 1), ended.output
    trials = table(folder, "trials").set_index("micro_batch")
    assert dict(trials.status) == {2: "succeeded", 8: "out_of_memory"}
    assert trials.loc[2, "samples_per_s"] > 0
    assert trials.loc[2, "param_fits"] == 4
    assert (trials.attempts == 1).all()


def test_a_metric_that_the_script_lacks_ends_the_sweep_after_the_first_trial(
    raypipe: Run, folder: Path
) -> None:
    axes = {"training.learning_rate": [0.1, 0.2, 0.3]}
    quality = {"stage": "train", "kind": "quality", "axes": axes}
    ended = raypipe("sweep", sweep=quality | {"metric": "eval_acc"})
    assert ended.status == 1, ended.output
    assert "eval_acc: the first finished trial has no such metric; did you mean eval_accur" in (
        ended.output
    )
    assert "recommended" not in ended.output
    assert len(table(folder, "trials")) == 1
    # the right name continues; all trials have the same accuracy, and more of it is better
    ended = raypipe("sweep", sweep=quality)
    assert ended.status == 0, ended.output
    assert len(table(folder, "trials")) == 3
    best = table(folder, "recommendations").iloc[0]
    assert (best["metric"], best["mode"]) == ("eval_accuracy", "max")


def test_a_systems_sweep_counts_steps(raypipe: Run) -> None:
    given = {
        "command": COMMAND.replace("{steps}", "{epochs}"),
        "training": {"steps": None, "epochs": 2},
    }
    axes = {"training.learning_rate": [0.1, 0.2]}
    ended = raypipe("sweep", **given, sweep={"stage": "train", "axes": axes})
    assert ended.status == 2
    assert "receives {epochs}, and a systems sweep counts steps; use {steps}, or kind: q" in (
        ended.output
    )


def test_a_script_takes_the_product_of_its_batch_sizes(raypipe: Run) -> None:
    kept = {"effective_batch": 8}
    sweep = {"stage": "train", "constraints": kept, "axes": {"training.micro_batch": [3, 4, 5]}}
    ended = raypipe("plan", sweep=sweep, training={"micro_batch": 8})
    assert ended.status == 0, ended.output
    assert "3 trials of 15 steps" in ended.output  # one point, measured three times


def test_a_trial_without_a_speed_is_a_failure(raypipe: Run, folder: Path) -> None:
    (folder / "once.py").write_text(
        "import sys\n"
        "n = int(sys.argv[1])\n"
        "text = ''.join(f'{{\"step\": {k}, \"loss\": 1}}\\n' for k in range(1, n + 1))\n"
        "open(sys.argv[2] + '/metrics.jsonl', 'w').write(text if len(sys.argv) == 4 else '')\n"
    )
    (folder / "values").write_text("RAYPIPE_LEARNING_RATE RAYPIPE_PRECISION")
    for extra, message in (("{micro_batch}", "records came at once"), ("", "{log_every} steps")):
        training = {"micro_batch": 1, "accumulation": 1}
        axes = {"training.learning_rate": [0.1]}
        ended = raypipe(
            "sweep",
            command=f"python once.py {{steps}} {{output_dir}} {extra}",
            files=["once.py", "values"],
            training=training,
            sweep={"stage": "train", "axes": axes},
        )
        assert ended.status == 1
        assert message in table(folder, "failures").message.iloc[-1]


def test_a_matrix_has_parameters_as_axes(raypipe: Run, folder: Path) -> None:
    matrix = {"parameters.wait": [1, 2], "train.training.seed": [0, 1]}
    ended = raypipe(
        "run",
        extra="--fail w{wait}s{seed}",
        parameters={"wait": 0},
        matrix=matrix,
        training={"steps": 3},
    )
    assert ended.status == 0, ended.output
    trials = table(folder, "trials")
    assert sorted(zip(trials.param_wait, trials.seed, strict=True)) == [
        (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert len(table(folder, "steps")) == 12


def test_fit_finds_the_largest_micro_batch(raypipe: Run, folder: Path) -> None:
    ended = raypipe(
        "fit",
        extra="--pause 0.08 --fits 5 --precision {precision}",
        training={"micro_batch": None, "accumulation": None, "effective_batch": 16},
    )
    assert ended.status == 0, ended.output
    assert any(line.split()[1:4] == ["fp32", "5", "4"] for line in ended.output.splitlines()), (
        ended.output
    )


def test_rows_of_an_attempt_without_a_checkpoint_do_not_stay(raypipe: Run, folder: Path) -> None:
    given = {"command": "python train.py {micro_batch} {accumulation} {steps}", "metrics": "stdout"}
    code = "import json, sys\nfor s in range(1, {}): print(json.dumps(dict(step=s, loss={})))\n"
    (folder / "train.py").write_text(code.format(9, 9.0) + "sys.exit(3)\n")
    assert raypipe("run", **given).status == 1
    (folder / "train.py").write_text(code.format(4, 0.5))
    assert raypipe("run", **given).status == 0
    run = RunDirectory.at("run")
    assert list(read_table(run, "steps")["loss"]) == [0.5] * 3
    assert list(read_table(run, "trials")["loss_final"]) == [0.5]


def test_an_edited_script_does_not_receive_the_checkpoint_of_the_earlier_one(
    raypipe: Run, folder: Path
) -> None:
    command = "python train.py {micro_batch} {accumulation} {steps} {checkpoint_dir}"
    code = (
        "import json, pathlib, sys\n"
        "saved = pathlib.Path(sys.argv[4], 'saved')\n"
        "print(json.dumps(dict(step=3, loss=float(saved.exists()))))\n"
        "saved.touch()\n"
    )
    given = {"command": command, "metrics": "stdout"}
    (folder / "train.py").write_text(code + "sys.exit(3)\n")
    assert raypipe("run", **given).status == 1
    assert raypipe("run", **given).status == 1  # the same script sees its own
    (folder / "train.py").write_text(code)
    assert raypipe("run", **given).status == 0
    assert list(read_table(RunDirectory.at("run"), "trials")["loss_final"]) == [0.0]


def sized(
    raypipe: Run, folder: Path, sizes: str, verb: str = "run", *values: str, **given: Any
) -> Ended:
    """The run of a script that writes its arguments, which are ``sizes``."""
    (folder / "own.py").write_text(
        "import json, sys\n"
        "for step in (1, 2):\n"
        "    print(json.dumps({'step': step, 'loss': 1 / step, 'first': int(sys.argv[1])}))\n"
        "print(sys.argv[1:])\n"
    )
    none = {"steps": 2, "micro_batch": None, "accumulation": None}
    training = {**none, **given.pop("training", {})}
    command = f"python own.py {{steps}} {sizes}"
    return raypipe(verb, *values, command=command, metrics="stdout", training=training, **given)


@pytest.mark.parametrize("case", cases("sizes"), ids=str)
def test_a_script_takes_the_batch_sizes_that_it_names(
    raypipe: Run, folder: Path, case: Any
) -> None:
    ended = sized(raypipe, folder, case["sizes"], training=case["training"])
    assert ended.status == 0, ended.output
    assert str(case["arguments"]) in log(folder).splitlines()
    row = trial(folder)
    values = [row[name] for name in ("micro_batch", "accumulation", "effective_batch")]
    assert [None if pd.isna(value) else value for value in values] == case["columns"]


def test_a_sweep_of_a_script_with_a_batch_of_its_own(raypipe: Run, folder: Path) -> None:
    axes = {"training.learning_rate": [0.1, 0.2]}
    sweep = {"stage": "train", "kind": "quality", "metric": "loss_final", "axes": axes}
    ended = sized(raypipe, folder, "{learning_rate}", "sweep", sweep=sweep)
    assert ended.status == 0, ended.output
    assert "recommended: learning_rate=" in ended.output
    assert table(folder, "trials")[["micro_batch", "effective_batch"]].isna().all(axis=None)
    axes = {"training.micro_batch": [4, 8]}
    ended = sized(raypipe, folder, "", "sweep", sweep={**sweep, "axes": axes})
    assert ended.status == 2
    assert "train.training.micro_batch = 4: does not reach the script" in ended.output
    ended = sized(raypipe, folder, "", "fit")
    assert ended.status == 2
    assert "the script does not receive {micro_batch}" in ended.output
