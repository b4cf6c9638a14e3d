"""Rounds of chaos: a real run that is disturbed at random, then ended, is the undisturbed one.

Of three rounds the first is the main job with a sweep, the second with a matrix, and the third is
thousands of calls of milliseconds, which are sent in chunks.

``python -m tests.chaos.rounds --rounds 50`` prints how often each disturbance was survived, and
how often tasks and trainings failed and were tried again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from random import Random

import pandas as pd
import psutil
import typer

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
_CALLS = ["map", "tests.chaos.calls:square", "number=0..3999", "--time-limit", "6s"]
_KINDS = 3

# the names of the disturbances that had something to disturb, how often the run had each kind of
# failure, and what it must share with an undisturbed one
Ended = tuple[list[str], Counter[str], Mapping[str, pd.DataFrame]]


def run_round(number: int, seed: int, folder: Path, disturbances: Sequence[str]) -> Ended:
    """A run of the round's kind is disturbed, then ended; nothing is left of it.

    It ends undisturbed: alone, or on nodes whose stores are empty after it.
    """
    with surroundings.disk(folder / f"{number:03d}") as home:
        config = home / "chaos.yaml"
        arguments = ["run", str(config), "--only", "train_small", "lda"]
        if number % _KINDS == 0:
            config.write_text(_BASE + _SWEEP)
            arguments.append("sweep")
        elif number % _KINDS == 1:
            config.write_text(_BASE.replace("runs: 2", "runs: 1") + _MATRIX)
        else:
            arguments = _CALLS
        name, rng = f"{seed}-{number}-{os.getpid()}", Random(f"{seed}-{number}")
        scene = Scene(home, name, arguments, rng)
        done = []
        try:
            for disturbance in disturbances:
                if ALL[disturbance](scene) is not False:
                    done.append(disturbance)
                scene.end()
                assert_gone(scene.name)
            if rng.random() < 0.5:
                scene.launch()
                output = scene.end()
            else:
                with surroundings.two_nodes(scene.name) as cluster:
                    scene.launch(cluster.address)
                    output = scene.end()
                    surroundings.assert_stores_empty(cluster)
            assert scene.process.returncode == 0, output
            assert_gone(scene.name)
        finally:
            for process in living(scene.name):  # of a round that failed
                process.kill()
        run = RunDirectory.at(scene.folder)
        with writing(run, print):  # no stale lock
            pass
        assert not list(scene.folder.rglob("*.tmp"))
        failures = Counter(read_table(run, "failures")["kind"])
        if arguments is _CALLS:
            calls = read_table(run, "calls").sort_values("number", ignore_index=True)
            return done, failures, {"calls": calls[["number", "value"]]}
        return done, failures, main_job.outcome(scene.folder, "variant")


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
    numbers: Sequence[int], seed: int, folder: Path, chosen: Sequence[str], most: int, jobs: int
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
            for number in {each % _KINDS - _KINDS for each in numbers}
        }
        rounds = {
            pool.submit(run_round, number, seed, folder, draw(number, seed, chosen, most)): number
            for number in numbers
        }
        expected = {number: future.result()[2] for number, future in undisturbed.items()}
        for future in as_completed(rounds):
            try:
                done, kinds, tables = future.result()
                main_job.assert_same(tables, expected[rounds[future] % _KINDS - _KINDS])
            except Exception as error:  # the other rounds go on
                error.add_note(f"in round {rounds[future]} of seed {seed}")
                broken.append(error)
                print(f"round {rounds[future]}: FAILED: {str(error)[-2000:]}", flush=True)
                continue
            print(f"round {rounds[future]}: {', '.join(done) or '-'}", flush=True)
            counts.update(done)
            failures.update(kinds)
    if broken:
        raise ExceptionGroup(f"{len(broken)} of {len(rounds)} rounds failed", broken)
    left = _traces() - before  # others may use Ray here too
    # agents of a node whose raylet was killed look for its head for a minute
    until(lambda: not left & _traces(), "no trace is left", 150)
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


def main(
    rounds: int = 50,
    first: int = 0,
    seed: int = 0,
    jobs: int = 4,
    most: int = 2,
    only: list[str] | None = None,
) -> None:
    """Run rounds, ``jobs`` of them at the same time, with ``most`` disturbances each."""
    numbers, chosen = range(first, first + rounds), only or tuple(ALL)
    with tempfile.TemporaryDirectory(prefix="raypipe-chaos-") as folder:
        counts, failures = run_rounds(numbers, seed, Path(folder), chosen, most, jobs)
    told = {"rounds": rounds, "seed": seed}
    print(json.dumps({**told, "survived": dict(counts), "failures": dict(failures)}))


if __name__ == "__main__":
    typer.run(main)
