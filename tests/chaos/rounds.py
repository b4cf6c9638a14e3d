"""Rounds of chaos: a real run that is disturbed at random, then ended, is the undisturbed one.

``python -m tests.chaos.rounds --rounds 50`` prints how often each disturbance was survived, and
how often tasks and trainings failed and were tried again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pandas as pd
import psutil

from raypipe.store.lock import writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.chaos import surroundings
from tests.chaos.disturbances import ALL
from tests.chaos.scene import Scene, assert_gone, living
from tests.clusters import main_job
from tests.command import until

_BASE = main_job.CONFIG.replace(
    "cpus: 1, cache: false", "optimizers: [ga, tpe], time_limit_s: 6"
).replace("steps: 6,", "steps: 40,")
_SWEEP = """
sweep:
  stage: train_small
  kind: quality
  axes: {training.learning_rate: [0.001, 1.0e+30]}  # the second diverges
  constraints: {effective_batch: 4}
"""
_MATRIX = "matrix: {lda.max_iter: [2, 3], runs: 2}\n"
_GONE_S = 150  # agents of a node whose raylet was killed look for its head for a minute
_STAGES = ("train_small", "lda")


@dataclass(frozen=True)
class Ended:
    """A run that came to its end.

    Attributes:
        disturbances: the names of those that had something to disturb.
        failures: in the run, by their kind.
        tables: what a disturbed run must share with an undisturbed one.

    """

    disturbances: Sequence[str]
    failures: Counter[str]
    tables: Mapping[str, pd.DataFrame]


def run_round(number: int, seed: int, folder: Path, disturbances: Sequence[str]) -> Ended:
    """A run is disturbed a few times, then ended; nothing of it may be left behind."""
    done = []
    with surroundings.disk(folder / f"{number:03d}") as home:
        config = home / "chaos.yaml"
        text, stages = configuration(number)
        config.write_text(text)
        name, rng = f"{seed}-{number}-{os.getpid()}", Random(f"{seed}-{number}")
        scene = Scene(home, name, [str(config), "--only", *stages], rng)
        try:
            for disturbance in disturbances:
                if ALL[disturbance](scene):
                    done.append(disturbance)
                scene.end()
                assert_gone(scene.name)
            _finish(scene)
            assert_gone(scene.name)
        finally:
            for process in living(scene.name):  # of a round that failed
                process.kill()
        run = RunDirectory.at(scene.folder)
        with writing(run, print):  # no stale lock
            pass
        assert not list(scene.folder.rglob("*.tmp"))
        failures = Counter(read_table(run, "failures")["kind"])
        return Ended(done, failures, main_job.outcome(scene.folder, "variant"))


def configuration(number: int) -> tuple[str, tuple[str, ...]]:
    """The configuration of a round and its stages: a sweep, in odd rounds a matrix."""
    if number % 2:
        return _BASE.replace("runs: 2", "runs: 1") + _MATRIX, _STAGES
    return _BASE + _SWEEP, ("sweep", *_STAGES)


def _finish(scene: Scene) -> None:
    """The command undisturbed, to its end: alone, or on nodes whose stores are empty after it."""
    if scene.rng.random() < 0.5:
        scene.launch()
        output = scene.end()
    else:
        with surroundings.two_nodes(scene.name) as cluster:
            scene.launch(cluster.address)
            output = scene.end()
            surroundings.assert_stores_empty(cluster)
    assert scene.process.returncode == 0, output


def draw(number: int, seed: int, chosen: Sequence[str], most: int) -> list[str]:
    """One to ``most`` disturbances; over the rounds each comes about as often as the others."""
    each = len(chosen)
    deck = Random(f"{seed}-deck-{number // each}").sample(list(chosen), each)
    rng = Random(f"{seed}-draw-{number}")
    others = [one for one in chosen if one != deck[number % each]]
    drawn = [deck[number % each], *rng.sample(others, rng.randint(0, min(most - 1, len(others))))]
    rng.shuffle(drawn)
    return drawn


def run_rounds(
    numbers: Sequence[int],
    seed: int,
    folder: Path,
    chosen: Sequence[str] = tuple(ALL),
    most: int = 2,
    jobs: int = 4,
) -> tuple[Counter[str], Counter[str]]:
    """Rounds, ``jobs`` at a time: how often each disturbance, and each kind of failure, came.

    Raises:
        ExceptionGroup: of what went wrong in the rounds that failed.

    """
    before = _traces()
    counts, failures, broken = Counter[str](), Counter[str](), []
    context = multiprocessing.get_context("spawn")  # a round may use Ray itself
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        undisturbed = {
            number: pool.submit(run_round, number, seed, folder, ())
            for number in (-2, -1)
            if any(number % 2 == other % 2 for other in numbers)
        }
        rounds = {
            pool.submit(run_round, number, seed, folder, draw(number, seed, chosen, most)): number
            for number in numbers
        }
        expected = {number: future.result().tables for number, future in undisturbed.items()}
        for future in as_completed(rounds):
            try:
                ended = future.result()
                main_job.assert_same(ended.tables, expected[rounds[future] % 2 - 2])
            except Exception as error:  # the other rounds go on
                error.add_note(f"in round {rounds[future]} of seed {seed}")
                broken.append(error)
                print(f"round {rounds[future]}: FAILED: {str(error)[-2000:]}", flush=True)
                continue
            print(f"round {rounds[future]}: {', '.join(ended.disturbances) or '-'}", flush=True)
            counts.update(ended.disturbances)
            failures.update(ended.failures)
    if broken:
        raise ExceptionGroup(f"{len(broken)} of {len(rounds)} rounds failed", broken)
    _assert_gone(_traces() - before)
    return counts, failures


def _traces() -> set[Path | psutil.Process]:
    """What Ray may leave on a machine: files in shared memory, processes whose parent is gone."""
    semaphores = set(Path("/dev/shm").glob("sem.mp-*"))  # of the pool of rounds
    orphans = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.ppid() == 1 and "ray::" in " ".join(process.cmdline()):
                orphans.add(process)
    return {*Path("/dev/shm").iterdir()} - semaphores | orphans


def _assert_gone(traces: set[Path | psutil.Process]) -> None:
    """Wait until none of them is there: others may use Ray here too."""
    until(lambda: not traces & _traces(), "no trace is left", _GONE_S)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4, help="rounds at the same time")
    parser.add_argument("--only", nargs="+", default=[*ALL], choices=ALL, metavar="NAME")
    parser.add_argument("--most", type=int, default=2, help="disturbances a round")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.rounds)
    with tempfile.TemporaryDirectory(prefix="raypipe-chaos-") as folder:
        counts, failures = run_rounds(
            numbers, given.seed, Path(folder), given.only, given.most, given.jobs
        )
    told = {"rounds": given.rounds, "seed": given.seed}
    print(json.dumps({**told, "survived": dict(counts), "failures": dict(failures)}))


if __name__ == "__main__":
    main()
