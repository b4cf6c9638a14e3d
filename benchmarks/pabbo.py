"""Benchmark the training of PABBO against the existing implementation, on the same cores.

    OMP_NUM_THREADS=1 python -m benchmarks.pabbo --reference CHECKOUT/pabbo_method

``CHECKOUT`` is the public repository draiqw/lgd, branch SABO; ``pabbo_reference.py`` lists what is
replaced in it. There are two comparisons, both in CPU time of the process, which other work on the
machine hardly affects:

1. steps per second at equal settings (small model; burn-in batch 16; policy batch 8 x 10
   trajectories of 30 duels; 50 points, pairs and prediction points; contexts up to 20; 31
   prediction splits; the published policy gradient), in alternating blocks;
2. held-out simple regret by CPU time: the reference's quick training (2000 steps of its
   ``train()``) against our recipe. Our evaluation measures both on the same functions and
   candidate pairs, once with the best score and once with draws from the policy, as the
   reference's evaluation does. The held-out functions are joint draws of Gaussian processes. With
   ``--published``, both final models are also measured on PABBO's published functions, which the
   reference's sampler made.

Results: ``speed.csv``, ``curves.csv``, ``published.csv``, ``summary.json``, ``curves.png`` and
``curves.svg``.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import typer
from safetensors.torch import save

from benchmarks.pabbo_reference import MODEL, QUICK, SAMPLER, load_reference, reference_scorer
from experiments.pabbo_lda.pabbo.evaluation import (
    HELD_OUT,
    EvaluationSettings,
    HeldOut,
    Scorer,
    held_out_functions,
    policy_scorer,
    random_scorer,
    regret_rows,
    simple_regret,
)
from experiments.pabbo_lda.pabbo.functions import (
    Candidates,
    SyntheticFunctionSettings,
    bowl,
    draw_pairs,
)
from experiments.pabbo_lda.pabbo.model import PabboModel
from experiments.pabbo_lda.pabbo.training import PabboSettings, PabboTask
from experiments.pabbo_lda.settings import training_recipe
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from raypipe.training.task import StepContext
from raypipe.training.weights import parse_weights

EQUAL = PabboSettings(
    prediction_splits=31, policy_gradient="published", policy_learning_rate=3e-5, burn_in=0.4,
    policy_batch=8, trajectories=10, query_points=50, candidate_pairs=50,
)  # fmt: skip
BURN_IN = Phase("burn_in", 1, 16, 1e-3)
POLICY = Phase("policy", 1, 8, 3e-5)
MODES = {"best score": False, "drawn": True}
#: stream of the keyed draws of the published functions' pairs
_STREAM_PAIRS = 20


@dataclass(frozen=True)
class Point:
    """Regret at one point of a training, or of random search."""

    method: str
    mode: str
    step: int
    cpu_s: float
    final: float
    final_low: float
    final_high: float
    all_steps: float
    by_function: dict[str, Any] = field(repr=False)

    def row(self) -> dict[str, Any]:
        """Return the row without the regrets of single functions."""
        values = asdict(self)
        del values["by_function"]
        return values


def our_steps(task: PabboTask, phase: Phase, count: int) -> float:
    """Return the CPU seconds of ``count`` optimizer steps of a phase."""
    model = task.build_model()
    optimizer = torch.optim.Adam(model.parameters(), phase.learning_rate)
    start = time.process_time()
    for step in range(count):
        samples = torch.arange(step * phase.samples, (step + 1) * phase.samples)
        loss = task.loss(model, samples, StepContext(step, phase, 0))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    return time.process_time() - start


def their_steps(reference: Any, folder: Path, burn_in: int, policy: int) -> float:
    """Return the CPU seconds of the reference's ``train()`` for the given numbers of steps."""
    model = reference.TransformerModel(**MODEL)
    save, torch.save = torch.save, lambda *_: None
    changes = {"n_steps": burn_in + policy, "n_burnin": burn_in}
    start = time.process_time()
    try:
        reference.train(
            expid="speed", exp_path=str(folder), model=model, model_kwargs=MODEL,
            dataname="GP1D", x_range=[[-1.0, 1.0]], sampler_kwargs=SAMPLER, save_freq=10**9,
            print_freq=10**9, device="cpu", wb=False, **{**QUICK, **changes},
        )  # fmt: skip
    finally:
        torch.save = save
    return time.process_time() - start


def profile_policy_step() -> str:
    """Return the time of our policy step at equal settings, by operator."""
    our_steps(PabboTask(EQUAL), POLICY, 1)
    with torch.profiler.profile() as profile:
        our_steps(PabboTask(EQUAL), POLICY, 4)
    table: str = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15)
    return table


def measure_speed(reference: Any, work: Path, blocks: int) -> tuple[list[dict[str, Any]], Any]:
    """Return the rows of alternating blocks, and the speed ratios with their spread."""
    task = PabboTask(EQUAL)
    phases = {"burn_in": (BURN_IN, 10), "policy": (POLICY, 4)}
    rows: list[dict[str, Any]] = []
    for block in range(blocks + 1):
        for name, (phase, count) in phases.items():
            ours = our_steps(task, phase, count) / count
            steps = (count, 0) if name == "burn_in" else (0, count)
            theirs = their_steps(reference, work / "speed", *steps) / count
            if block:  # the first block warms up
                rows.append({"block": block, "phase": name, "ours_s": ours, "reference_s": theirs})
    ratios: dict[str, list[float]] = {"burn_in": [], "policy": [], "combined": []}
    for block in range(1, blocks + 1):
        burn_in, policy = (row for row in rows if row["block"] == block)
        for row in (burn_in, policy):
            ratios[row["phase"]].append(row["reference_s"] / row["ours_s"])
        total = [800 * burn_in[k] + 1200 * policy[k] for k in ("reference_s", "ours_s")]
        ratios["combined"].append(total[0] / total[1])
    return rows, {
        name: {"median": float(np.median(r)), "low": min(r), "high": max(r)}
        for name, r in ratios.items()
    }


def train_ours(
    settings: PabboSettings, training: TrainingSettings, folder: Path
) -> list[tuple[int, float, bytes]]:
    """Train our recipe in this process; return (step, CPU s, weights) of each checkpoint."""
    run = RunDirectory.at(folder)
    stage = TrainStageSettings(training=training)
    batch = training.effective_batch or 1
    plan = BatchPlan(batch, 1, batch, workers=1)
    job = TrainingJob("pabbo", "benchmark", PabboTask(settings), stage, plan, run)
    spent: dict[int, float] = {}
    start = time.process_time()

    def note(row: dict[str, Any] | str) -> None:
        if isinstance(row, dict):
            spent[row["step"]] = time.process_time() - start

    train(job, Worker(0, torch.device("cpu")), note)
    store = CheckpointStore(run, "pabbo")
    return [
        (step, cpu_s, save(store.read(f"step_{step:08d}").model)) for step, cpu_s in spent.items()
    ]


def measure(method: str, step: int, cpu_s: float, score: Scorer, held_out: HeldOut,
            settings: EvaluationSettings) -> list[Point]:  # fmt: skip
    """Return the regret of one scorer, in both modes."""
    points = []
    for mode, sampled in MODES.items():
        chosen = settings.model_copy(update={"sampled": sampled})
        regret = simple_regret(score, held_out, chosen)
        last = regret_rows({method: regret})[-1]
        final, low, high = last["mean"], last["low"], last["high"]
        single = {
            "final": regret[..., -1].mean(1).double().numpy(),
            "all_steps": regret.mean((1, 2)).double().numpy(),
        }
        mean = float(regret.mean())
        points.append(Point(method, mode, step, cpu_s, final, low, high, mean, single))
        typer.echo(points[-1])
    return points


def published_functions(path: Path, settings: EvaluationSettings) -> HeldOut:
    """Return PABBO's published set of 1-D functions (``gp1d_tasks.npz``) with its starting duels.

    The candidates are random pairs of the 100 points stored with each function.
    """
    with np.load(path) as stored:
        arrays = {name: torch.from_numpy(stored[name]).float() for name in (
            "train_X", "train_y", "x_opt", "y_opt", "f_offset", "initial_pairs", "initial_pairs_y",
        )}  # fmt: skip
    points = arrays["train_X"]
    utility = bowl(arrays["train_y"], points, arrays["x_opt"], arrays["f_offset"])
    samples = HELD_OUT + torch.arange(len(points))
    n = points.shape[1]
    count = min(settings.candidate_pairs, n * (n - 1) // 2)
    pairs = draw_pairs(settings.seed, _STREAM_PAIRS, samples, n, count)
    return HeldOut(
        Candidates.of(points, utility, pairs),
        arrays["y_opt"],
        arrays["x_opt"],
        arrays["initial_pairs"].transpose(0, 1)[:, :, None],
        arrays["initial_pairs_y"].transpose(0, 1)[:, :, None],
    )


def summarize(points: list[Point]) -> dict[str, Any]:
    """Return the CPU times from which our training equals or beats the final reference.

    All later points must be as good, too, so that a lucky early point does not count. "Beats"
    means that the 95 % interval of the mean difference to the final reference, over the same
    functions, is below zero. Each mode is compared with itself.
    """
    summary: dict[str, Any] = {}
    for mode in MODES:
        of = {name: [p for p in points if (p.method, p.mode) == (name, mode)]
              for name in ("ours", "reference", "random")}  # fmt: skip
        end = of["reference"][-1]
        for name in ("final", "all_steps"):
            entry: dict[str, Any] = {
                "reference_end": getattr(end, name),
                "reference_cpu_s": end.cpu_s,
                "random": getattr(of["random"][0], name),
                "ours_end": getattr(of["ours"][-1], name),
                "ours_cpu_s": of["ours"][-1].cpu_s,
                "reference_minus_random": difference(end, of["random"][0], name),
                "ours_minus_reference": difference(of["ours"][-1], end, name),
                "ours_minus_random": difference(of["ours"][-1], of["random"][0], name),
            }
            gaps = [(p.cpu_s, difference(p, end, name)) for p in of["ours"]]
            for label, column in (("as_good", "mean"), ("better", "high")):
                since = None
                for cpu_s, gap in reversed(gaps):
                    if gap[column] > 0:
                        break
                    since = cpu_s
                entry[f"{label}_from_cpu_s"] = since
                entry[f"{label}_cpu_time_ratio"] = end.cpu_s / since if since else None
            summary[f"{name}, {mode}"] = entry
    return summary


def difference(one: Point, other: Point, name: str) -> dict[str, float]:
    """Return the mean difference over the same functions with its 95 % interval."""
    gaps = one.by_function[name] - other.by_function[name]
    half = 1.96 * gaps.std(ddof=1) / np.sqrt(len(gaps))
    return {"mean": gaps.mean(), "low": gaps.mean() - half, "high": gaps.mean() + half}


def draw(points: list[Point], out: Path) -> None:
    """Plot both regret measures over CPU time."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharex=True)
    titles = {"final": "after 30 duels", "all_steps": "mean over 30 duels"}
    styles = {"best score": "-", "drawn": "--"}
    colors = {"reference": "C1", "ours": "C0"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for method, color in colors.items():
            for mode, style in styles.items():
                chosen = [p for p in points if (p.method, p.mode) == (method, mode)]
                axis.plot([p.cpu_s for p in chosen], [getattr(p, name) for p in chosen],
                          style, color=color, marker=".", label=f"{method}, {mode}")  # fmt: skip
        random = next(p for p in points if p.method == "random")
        axis.axhline(getattr(random, name), color="grey", linestyle=":", label="random search")
        axis.set(xscale="log", yscale="log", xlabel="CPU time (s)", title=title)
        axis.set_ylabel("simple regret on held-out functions")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    for suffix in ("png", "svg"):
        figure.savefig(out / f"curves.{suffix}", dpi=150)
    plt.close(figure)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows that have the same keys."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main(
    reference: Annotated[Path, typer.Option(help="the folder pabbo_method of the checkout")],
    work: Annotated[
        Path, typer.Option(help="for checkpoints; a finished reference run in it is used")
    ] = Path("runs/pabbo_reference"),
    out: Annotated[Path, typer.Option(help="for the results")] = Path("benchmarks/results/pabbo"),
    blocks: Annotated[int, typer.Option(help="alternating blocks of the speed measure")] = 7,
    functions: Annotated[int, typer.Option(help="held-out functions")] = 256,
    published: Annotated[Path | None, typer.Option(help="gp1d_tasks.npz")] = None,
    threads: Annotated[int, typer.Option(help="threads of both")] = 1,
    seed: Annotated[int, typer.Option(help="of both trainings")] = 0,
) -> None:
    """Measure and write the results."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    theirs = work / f"seed{seed}"
    times = theirs / "times.jsonl"
    if not (theirs / f"{QUICK['n_steps']}.pt").is_file():
        command = [sys.executable, "-m", "benchmarks.pabbo_reference"]
        command += [str(reference), str(theirs), "50", str(seed)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    module = load_reference(reference)
    speed, ratios = measure_speed(module, work, blocks)
    write_csv(out / "speed.csv", speed)
    typer.echo(json.dumps(ratios))
    (out / "profile.txt").write_text(profile_policy_step())

    # a seed on which no setting was tuned
    settings = EvaluationSettings(
        functions=functions, starts=1, query_points=128, candidate_pairs=512, seed=1
    )
    held_out = held_out_functions(settings, SyntheticFunctionSettings())
    points = measure("random", 0, 0.0, random_scorer(0, held_out), held_out, settings)
    ours = PabboSettings(evaluation=EvaluationSettings(functions=1))  # evaluated below
    points_of = {"log_every": 100, "checkpoint_every": 100, "keep_checkpoints": 10, "seed": seed}
    training = training_recipe(steps=1000, effective_batch=32).model_copy(update=points_of)
    with TemporaryDirectory() as folder:
        trained = train_ours(ours, training, Path(folder))
    for step, cpu_s, weights in trained:
        model = PabboModel(ours.model).eval()
        model.load_state_dict(parse_weights(weights)[0])
        points += measure("ours", step, cpu_s, policy_scorer(model), held_out, settings)
    for row in map(json.loads, times.read_text().splitlines()):
        if row["step"] in (100, 400, 800) or row["step"] % 400 == 0:
            score = reference_scorer(module, theirs / f"{row['step']}.pt")
            points += measure("reference", row["step"], row["cpu_s"], score, held_out, settings)
    write_csv(out / "curves.csv", [point.row() for point in points])
    draw(points, out)
    ends: list[Point] = []
    if published is not None:
        tasks = published_functions(published, settings)
        ends += measure("random", 0, 0.0, random_scorer(0, tasks), tasks, settings)
        ends += measure("ours", step, cpu_s, policy_scorer(model), tasks, settings)
        ends += measure("reference", row["step"], row["cpu_s"], score, tasks, settings)
        write_csv(out / "published.csv", [point.row() for point in ends])
    summary = {"steps_per_second_ratio": ratios, "regret": summarize(points), "threads": threads}
    if ends:
        summary["published_functions"] = summarize(ends)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
