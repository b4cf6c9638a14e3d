"""Benchmark the scheduling of stages on simulated clusters: makespan, and cost per stage.

    python -m benchmarks.scheduler

Random graphs of 200 stages run on clusters that do not exist: the allocator of the pipeline decides
as in a run, a simulated clock moves from one end of a stage to the next. Half of the stages are
trainings of 1 to 8 GPUs (of 1 or 2 CPUs where there are none), a tenth measures alone on a node,
the others are groups of CPUs and pools of short CPU tasks. Durations are log-normal. On the
cluster of spot nodes, nodes vanish and return; what ran there starts again and has kept nine tenths
of its work.

The makespan is divided by a lower bound that no schedule can beat: the longest path of the graph,
or the time in which the cluster has as many CPU or GPU seconds as the graph needs. Strategies:

- ``known``: durations are known from earlier runs,
- ``unknown``: they are not; ranks count stages,
- ``lanes``: at most one stage on GPUs and one other at a time, as raypipe 0.2.0 ran them.

The cost is the time that the engine itself takes per stage: 200 stages that do nothing, with their
ledger and tables, by the runner on a local disk.

Results: ``benchmarks/results/scheduler/makespan.json``.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.training import machine
from raypipe.config.settings import Settings
from raypipe.integrations.tracking import Target, Trackers
from raypipe.launch.inline import InlineLauncher
from raypipe.pipeline.allocator import Allocator, Claim, Lease, Resources
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Experiment, Stage
from raypipe.pipeline.identity import compose
from raypipe.pipeline.progress import Display
from raypipe.pipeline.runner import run_stages
from raypipe.pipeline.session import Session
from raypipe.provenance import git_commit
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory

STAGES = 200
STRATEGIES = ("known", "unknown", "lanes")
#: largest acceptable median and worst makespan, and the cost of a stage in seconds
TARGETS = {"median": 1.15, "worst": 1.3, "cost_s": 0.05}
KEPT = 0.9
CPU_NODE, GPU_NODE = {"CPU": 2.0}, {"CPU": 32.0, "GPU": 8.0}
CLUSTERS: dict[str, dict[str, Resources]] = {
    "1 x 2 CPUs": {"a": CPU_NODE},
    "1 x 8 GPUs": {"a": GPU_NODE},
    "4 x 8 GPUs, spot": dict.fromkeys("abcd", GPU_NODE),
}


@dataclass
class Work:
    """A stage of a random graph.

    ``seconds`` is the duration of one with fixed resources; a pool has CPU seconds.
    """

    claim: Claim
    needs: tuple[int, ...]
    seconds: float
    pool_at_most: float = 1.0

    @property
    def shortest(self) -> float:
        """Seconds that it takes at least."""
        return self.seconds / self.pool_at_most if self.claim.pool else self.seconds


def graph(rng: random.Random, nodes: Mapping[str, Resources]) -> list[Work]:
    """Return a random graph whose stages need earlier ones."""
    node = next(iter(nodes.values()))
    cpus = sum(each["CPU"] for each in nodes.values())
    works = []
    for place in range(STAGES):
        earlier = range(max(0, place - 40), place)
        needs = rng.sample(earlier, min(len(earlier), rng.choice([0, 0, 1, 1, 2, 3])))
        seconds = rng.lognormvariate(3, 1)
        kind = rng.choices(("training", "alone", "group", "pool"), (5, 1, 2, 2))[0]
        if kind == "training" and "GPU" in node:
            workers = rng.choice((1, 1, 1, 1, 2, 2, 4, 8))
            claim = Claim({"CPU": 1.0, "GPU": 1.0}, workers, workers)
        elif kind == "alone" and "GPU" not in node:
            claim = Claim({"CPU": 1.0}, alone=True)
        elif kind == "pool":
            claim = Claim({"CPU": rng.choice((0.25, 0.5, 1.0))}, pool=True)
            seconds *= cpus / 2
        else:
            claim = Claim({"CPU": float(rng.choice((1, 1, 2)))})
        works.append(Work(claim, tuple(needs), seconds, cpus))
    return works


def losses(rng: random.Random, nodes: Mapping[str, Resources]) -> list[tuple[float, str, bool]]:
    """Return times at which nodes vanish (False) and return (True), for a long time."""
    events: list[tuple[float, str, bool]] = []
    for node in list(nodes)[1:]:
        now = 0.0
        while now < 20_000.0:
            gone = now + rng.expovariate(1 / 600)
            now = gone + rng.uniform(60, 240)
            events += [(gone, node, False), (now, node, True)]
    return sorted(events)


def lower_bound(
    works: Sequence[Work],
    nodes: Mapping[str, Resources],
    events: Sequence[tuple[float, str, bool]],
) -> float:
    """Return a makespan that no schedule can beat."""
    needed: dict[str, float] = {}
    for work in works:
        bundle = {"CPU": 1.0} if work.claim.pool else work.claim.bundle
        if work.claim.alone:
            bundle = next(iter(nodes.values()))
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0.0) + amount * work.claim.fewest * work.seconds
    bounds = [max(paths(works))]
    for name, amount in needed.items():
        there, now = set(nodes), 0.0
        for at, node, back in [*events, (math.inf, "", True)]:
            rate = sum(nodes[each][name] for each in there)
            if amount <= rate * (at - now):
                bounds.append(now + amount / rate)
                break
            amount -= rate * (at - now)
            now = at
            there ^= {node}
            del back
    return max(bounds)


def paths(works: Sequence[Work], *, known: bool = True) -> list[float]:
    """Return the longest remaining path of each stage, in seconds or in stages."""
    longest = [0.0] * len(works)
    for place in reversed(range(len(works))):
        longest[place] += works[place].shortest if known else 1.0
        for need in works[place].needs:
            longest[need] = max(longest[need], longest[place])
    return longest


class Simulation:
    """Run of a graph on a cluster, by the allocator's decisions."""

    def __init__(
        self,
        works: Sequence[Work],
        nodes: Mapping[str, Resources],
        events: Sequence[tuple[float, str, bool]],
        strategy: str,
    ) -> None:
        self.works, self.nodes, self.strategy = works, nodes, strategy
        self.known = strategy == "known"
        self.ranks = paths(works, known=self.known)
        self.events = list(events)
        self.allocator = Allocator(nodes)
        self.left = [work.seconds for work in works]
        self.leases: dict[int, Lease] = {}
        self.place_of: dict[int, int] = {}
        self.waiting = set(range(len(works)))
        self.over: set[int] = set()
        self.began: dict[int, float] = {}
        self.now = 0.0

    def run(self) -> float:
        """Return the makespan in simulated seconds."""
        while len(self.over) < len(self.works):
            self._request()
            for lease in self.allocator.admit(self.now):
                self.began[self.place_of[lease.number]] = self.now
            shares = self._shares()
            ends = [(self.began[i] + self.left[i], i) for i in self._fixed()]
            ends += [
                (self.now + self.left[i] / share, i) for i, share in shares.items() if share > 0
            ]
            heapq.heapify(ends)
            before, self.now = self.now, min(ends[0][0] if ends else math.inf, self._next_event())
            for place, share in shares.items():
                self.left[place] -= share * (self.now - before)
            for end, place in ends:
                if end <= self.now + 1e-9:
                    self.allocator.release(self.leases.pop(place))
                    self.began.pop(place, None)
                    self.over.add(place)
            while self.events and self.events[0][0] <= self.now:
                self._change(*self.events.pop(0)[1:])
        return self.now

    def _request(self) -> None:
        for place in sorted(self.waiting):
            work = self.works[place]
            if not set(work.needs) <= self.over or not self._lane_is_free(work):
                continue
            self.waiting.discard(place)
            seconds = self.left[place] if self.known and not work.claim.pool else math.inf
            lease = self.allocator.request(work.claim, self.ranks[place], seconds)
            self.leases[place], self.place_of[lease.number] = lease, place

    def _lane_is_free(self, work: Work) -> bool:
        def lane(work: Work) -> bool:
            return "GPU" in work.claim.bundle

        if self.strategy != "lanes":
            return True
        if not any("GPU" in node for node in self.nodes.values()):
            return not self.leases
        return not any(lane(self.works[place]) == lane(work) for place in self.leases)

    def _fixed(self) -> list[int]:
        return [i for i in self.began if not self.works[i].claim.pool]

    def _shares(self) -> dict[int, float]:
        """Return the CPUs of each pool; their tasks are so short that they end at once."""
        pools = [i for i in self.leases if self.works[i].claim.pool and self.leases[i].granted]
        pools.sort(key=lambda place: self.leases[place].order)
        for place in pools:
            self.leases[place].running = 0.0
        shares: dict[int, float] = {}
        for place in pools:
            shares[place] = self.allocator.share(self.leases[place])
            self.leases[place].running = shares[place]
        for place in pools:
            self.leases[place].running = 0.0
        return shares

    def _next_event(self) -> float:
        return self.events[0][0] if self.events else math.inf

    def _change(self, node: str, back: bool) -> None:
        there = dict(self.allocator.nodes)
        if back:
            there[node] = self.nodes[node]
        else:
            del there[node]
            for place in self._fixed():
                if node in self.leases[place].processes:
                    done = KEPT * (self.now - self.began.pop(place))
                    self.left[place] -= done
                    self.allocator.release(self.leases.pop(place))
                    self.waiting.add(place)
        self.allocator.nodes = there


def makespans(graphs: int) -> dict[str, dict[str, list[float]]]:
    """Return the makespans over the lower bound, by cluster and strategy."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, nodes in CLUSTERS.items():
        found[name] = {strategy: [] for strategy in STRATEGIES}
        for seed in range(graphs):
            rng = random.Random(seed)
            works = graph(rng, nodes)
            events = losses(rng, nodes) if "spot" in name else []
            bound = lower_bound(works, nodes, events)
            for strategy in STRATEGIES:
                span = Simulation(works, nodes, events, strategy).run()
                found[name][strategy].append(span / bound)
    return found


class _Threads(InlineLauncher):
    concurrent = True


def cost_per_stage() -> float:
    """Return the seconds that the runner takes per stage that does nothing."""

    def finish(context: StageContext) -> None:
        del context

    experiment = Experiment("nothing", 1, Settings, lambda _: [])
    works = graph(random.Random(0), CLUSTERS["1 x 8 GPUs"])
    stages = [
        Stage(f"s{place}", finish, needs=tuple(f"s{need}" for need in work.needs))
        for place, work in enumerate(works)
    ]
    with TemporaryDirectory() as folder:
        run_dir = RunDirectory.at(folder)
        none = Trackers((), Target(run_dir, "r", "nothing", {}))
        session = Session(run_dir, "r", Ledger(run_dir), _Threads(), Display(), [], none)
        begin_s = time.monotonic()
        run_stages(compose(experiment, Settings(), stages), session)
        return (time.monotonic() - begin_s) / STAGES


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Return the summary to print."""
    shown = Table(title="makespan over the lower bound", box=SIMPLE)
    for column in ("cluster", "strategy"):
        shown.add_column(column, no_wrap=True)
    for column in ("median", "worst"):
        shown.add_column(column, justify="right")
    for cluster, strategies in found.items():
        for strategy, ratios in strategies.items():
            shown.add_row(cluster, strategy, f"{median(ratios):.2f}", f"{max(ratios):.2f}")
    return shown


def main(
    graphs: Annotated[int, typer.Option(min=1, help="random graphs per cluster")] = 100,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path(
        "benchmarks/results/scheduler"
    ),
) -> None:
    """Simulate, measure the cost, and write the results."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found, cost_s = makespans(graphs), cost_per_stage()
    summary = {
        cluster: {
            strategy: {"median": median(ratios), "low": min(ratios), "high": max(ratios)}
            for strategy, ratios in strategies.items()
        }
        for cluster, strategies in found.items()
    }
    report: dict[str, Any] = {
        "started": started,
        "commit": git_commit(),
        "machine": machine(torch.device("cpu"), threads=1),
        "stages": STAGES,
        "graphs": graphs,
        "targets": TARGETS,
        "makespan": summary,
        "cost_per_stage_s": cost_s,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "makespan.json").write_text(json.dumps(report, indent=1) + "\n")
    Console().print(table(found))
    typer.echo(f"engine: {1e3 * cost_s:.1f} ms per stage")


if __name__ == "__main__":
    typer.run(main)
