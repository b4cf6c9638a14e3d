"""PABBO's two kinds of step on the card and on its CPUs, and what CUDA graphs could gain."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu_parts.bench import Bench, Row, message
from experiments.pabbo_lda.pabbo.training import PabboSettings, PabboTask
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext


def pabbo(bench: Bench) -> None:
    """Measure a step of each phase on the card and on the CPUs."""
    size = bench.pick(64, 64, 4)
    small = {"horizon": 3, "policy_batch": 4} if bench.machine.rehearsal else {}
    settings = PabboSettings(**small)
    task = PabboTask(settings)
    burn_in = Phase("burn_in", 1, size, 1e-3)
    phases = burn_in, Phase("policy", 1, settings.policy_batch, 3e-5)
    devices = bench.pick(("cuda", "cpu"), ("cuda", "cpu"), ("cpu",))
    cases = [(f"{phase.name} on {name}", name, phase) for name in devices for phase in phases]
    for key, name, phase in cases:
        step = _step(task, phase, torch.device(name))
        bench.measure(key, partial(_timed, step, phase, name == "cuda"))
    for key, name, phase in cases:  # last: a failed capture may break the context
        (row,) = bench.stored(key)
        if name == "cuda" and not {"graph_s", "graph", "error"} & row.keys():
            bench.put(key, {**row, **_graph(task, phase, torch.device(name))})


def _step(task: PabboTask, phase: Phase, device: torch.device) -> Callable[[], None]:
    """Return a function that runs the forward and the backward pass."""
    torch.manual_seed(0)
    model = task.build_model().to(device)
    batch = torch.arange(phase.samples, device=device)
    context = StepContext(0, phase, 0)

    def step() -> None:
        loss = task.loss(model, batch, context)
        (loss.total / loss.weight).backward()

    return step


def _timed(step: Callable[[], None], phase: Phase, on_card: bool) -> Row:
    """Return the time of a step; on a card also that of its kernels alone."""
    seconds = _seconds(step, on_card, 5 if on_card else 2)
    row = {
        "phase": phase.name,
        "runs_on": "card" if on_card else "CPUs",
        "samples": phase.samples,
        "step_time_s": seconds,
        "samples_per_s": phase.samples / seconds,
    }
    return {**row, **_kernels(step)} if on_card else row


def _kernels(step: Callable[[], None]) -> Row:
    """Return the number of kernels of a step, and the time in which they run."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    return {"kernels": len(kernels), "kernels_s": sum(each.device_time for each in kernels) / 1e6}


def _graph(task: PabboTask, phase: Phase, device: torch.device) -> Row:
    """Return the time of the replayed graph of a step, or why it is not captured."""
    try:
        step = _step(task, phase, device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what a first call allocates is not part of a graph
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return {"graph_s": _seconds(graph.replay, True, 5)}
    except Exception as error:  # PABBO draws on the host, which a graph cannot
        return {"graph": message(error)}


def _seconds(call: Callable[[], object], on_card: bool, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        if on_card:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return median(times[1:])
