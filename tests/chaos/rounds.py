"""Rounds of chaos: a real run that is disturbed at random, then ended, is the undisturbed one.

``python -m tests.chaos.rounds --rounds 50`` prints how often each disturbance was survived.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from subprocess import Popen

import pandas as pd
import psutil

from raypipe.lock import writing
from raypipe.paths import RunDirectory
from raypipe.results import read_table
from tests.chaos import disturbances
from tests.chaos.disturbances import Disturbance, Scene
from tests.command import start

PROJECT = Path(__file__).resolve().parents[2]
CONFIG = """
experiment: experiments.pabbo_lda
data: {options: {max_documents: 300, max_features: 200, min_df: 2}}
train_small:
  training: {steps: 40, micro_batch: 4, log_every: 2, checkpoint_every: 4}
  pabbo: {policy_batch: 2, trajectories: 2, horizon: 4}
sweep:
  stage: train_small
  kind: quality
  axes: {training.learning_rate: [0.001, 0.0001]}
  constraints: {effective_batch: 4}
lda:
  runs: 2
  optimizers: [ga, tpe]
  t_max: 60
  start: [9, 30, 55]
  evaluations: 8
  max_iter: 2
  batch_size: 64
"""
STAGES = ("--only", "sweep", "train_small", "lda")
#: what every process of a round has in its environment
MARK = "RAYPIPE_CHAOS"
_WAIT_S = 600
_GONE_S = 90
_TABLES = {
    "study_history": ["dataset", "optimizer", "run", "evaluation", "batch", "T", "value"],
    "evaluations": ["dataset", "seed", "T", "value"],
    "steps": ["trial_id", "step", "loss", "lr"],
    "trials": ["trial_id", "status", "steps", "loss_final"],
}


class Round:
    """One run directory with a cache of its own, and the commands on it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.cache, self.name = folder / "run", folder / "cache", name
        folder.mkdir(parents=True)
        self._config = folder / "chaos.yaml"
        self._config.write_text(CONFIG)

    def start(self, faults: str = "") -> Popen[str]:
        """The command, in a process of its own."""
        environment = {"RAYPIPE_CACHE": str(self.cache), "RAYPIPE_FAULTS": faults, MARK: self.name}
        given = ("run", self._config, "--run-dir", self.folder, *STAGES)
        return start(PROJECT, *given, environment=environment)

    def finish(self) -> None:
        """The command undisturbed, to its end."""
        process = self.start()
        output, _ = process.communicate(timeout=_WAIT_S)
        assert process.returncode == 0, output

    def disturb(self, disturbance: Disturbance, rng: Random) -> bool:
        """Start the command and disturb it somewhere; whether there was anything to disturb."""
        process = self.start(faults=f"delay_task:s=0.2,kill_task:p={rng.choice([0, 0.2])}")
        wait_for_rows(self.folder, process, rng.randint(1, 40))
        scene = Scene(process, self.start, self.folder, self.cache, rng)
        disturbed = disturbance(scene)
        output, _ = process.communicate(timeout=_WAIT_S)
        assert "Traceback" not in output, output
        return disturbed

    def outcome(self) -> dict[str, pd.DataFrame]:
        """What a disturbed run must share with an undisturbed one."""
        run = RunDirectory.at(self.folder)
        tables = {}
        for name, columns in _TABLES.items():
            rows = read_table(run, name)[columns].sort_values(columns[:4])
            tables[name] = rows.reset_index(drop=True)
        return tables

    def check_nothing_left(self) -> None:
        """No process of it lives, no lock is held, no temporary file lies about."""
        deadline = time.monotonic() + _GONE_S
        while left := list(living(self.name)):
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.5)
        with writing(RunDirectory.at(self.folder), print):
            pass
        assert not list(self.folder.rglob("*.tmp"))


def living(name: str) -> Iterator[psutil.Process]:
    """The processes of a round."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == name and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def wait_for_rows(folder: Path, process: Popen[str], rows: int) -> None:
    """Until the ledger has so many rows, or the command has ended."""
    deadline = time.monotonic() + _WAIT_S
    while process.poll() is None:
        if sum(path.read_bytes().count(b"\n") for path in folder.glob("ledger/*.jsonl")) >= rows:
            return
        assert time.monotonic() < deadline, f"{folder}: no {rows} rows in {_WAIT_S} s"
        time.sleep(0.05)


def assert_same(found: Mapping[str, pd.DataFrame], expected: Mapping[str, pd.DataFrame]) -> None:
    """Every unit is there once, with the values of the undisturbed run."""
    for name, table in expected.items():
        pd.testing.assert_frame_equal(found[name], table, obj=name)


def run_rounds(
    numbers: Sequence[int],
    seed: int,
    folder: Path,
    chosen: Sequence[Disturbance],
    most: int = 3,
) -> Counter[str]:
    """Rounds with one to ``most`` disturbances each; how often each had something to disturb."""
    plain = Round(folder / "undisturbed", f"chaos-{seed}-undisturbed-{os.getpid()}")
    plain.finish()
    expected = plain.outcome()
    plain.check_nothing_left()
    shared_before = set(Path("/dev/shm").iterdir())
    counts: Counter[str] = Counter()
    for number in numbers:
        rng = Random(f"{seed}-{number}")
        this = Round(folder / f"{number:03d}", f"chaos-{seed}-{number}-{os.getpid()}")
        done = []
        for disturbance in rng.sample(list(chosen), rng.randint(1, most)):
            if this.disturb(disturbance, rng):
                counts[disturbance.__name__] += 1
                done.append(disturbance.__name__)
        this.finish()
        assert_same(this.outcome(), expected)
        this.check_nothing_left()
        assert set(Path("/dev/shm").iterdir()) <= shared_before, "left in the object store"
        print(f"round {number}: {', '.join(done) or 'nothing to disturb'}", flush=True)
        shutil.rmtree(this.folder.parent)
    return counts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="raypipe-chaos-") as folder:
        numbers = range(given.first, given.first + given.rounds)
        counts = run_rounds(numbers, given.seed, Path(folder), disturbances.ALL)
    print(json.dumps({"rounds": given.rounds, "seed": given.seed, "survived": dict(counts)}))


if __name__ == "__main__":
    main()
