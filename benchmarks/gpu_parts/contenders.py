"""raypipe's loop, a hand-written loop and two trainers, in alternation on the same card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_parts.bench import Bench, Row, message
from benchmarks.loops.cases import LOG_EVERY, Case, make
from benchmarks.loops.measure import Alternation, Burst, Contender, largest_difference
from raypipe.training.data_sheets import peak_flops

_BY_HAND, _RAYPIPE = "by_hand", "raypipe_loop"


def loop(bench: Bench) -> None:
    """Measure raypipe's loop and the same one by hand, compiled."""
    bursts = bench.pick(10, 6, 3)
    case = _case(bench, bursts, bench.pick(8, 2, 1), compiled=not bench.machine.rehearsal)
    _alternate(bench, (_BY_HAND, _RAYPIPE), case)


def trainers(bench: Bench) -> None:
    """Measure Hugging Face's Trainer, Lightning and both loops; --quick does not compile."""
    compiled = bench.pick(True, False, False)
    case = _case(bench, bench.pick(6, 3, 2), bench.pick(8, 1, 1), compiled=compiled)
    _alternate(bench, (_BY_HAND, _RAYPIPE, "hf_trainer", "lightning_trainer"), case)


def _case(bench: Bench, bursts: int, accumulation: int, *, compiled: bool) -> Case:
    """Return the medium language model, in a rehearsal the tiny one, for a number of bursts."""
    device = torch.device(bench.pick("cuda:0", "cuda:0", "cpu"))
    name, processes = bench.pick(("lm-medium", 8), ("lm-medium", 4), ("lm-tiny", 0))
    case = make(name, (1 + bursts) * LOG_EVERY, device, processes)
    training = case.training.model_copy(update={"compile": compiled})
    return replace(case, accumulation=accumulation, training=training)


def _alternate(bench: Bench, names: Sequence[str], case: Case) -> None:
    """Store a row per contender, which grows with every burst."""
    device = torch.device(bench.pick("cuda:0", "cuda:0", "cpu"))
    earlier = [row for name in names for row in bench.stored(name)]
    if len(earlier) == len(names) and all("loss_difference" in row for row in earlier):
        return
    functions: dict[str, Contender] = {}
    for name in names:
        try:
            functions[name] = import_module(f"benchmarks.loops.{name}").train
        except ImportError as error:
            bench.put(name, {"contender": name, "error": message(error)})
    peak = peak_flops(bench.machine.device, case.training.precision)
    flops = case.task.flops_per_sample(case.task.build_model())
    counted: dict[str, list[Burst]] = {name: [] for name in functions}

    def put(name: str, **more: Any) -> None:
        row = summary(counted[name], counted[_BY_HAND], case)
        if peak is not None and flops is not None:
            row["mfu"] = row["tokens_per_s"] / case.units * flops / peak
        bench.put(name, {"contender": name, **row, **more})

    race = Alternation(functions, case, device)
    for burst in race.bursts():
        if burst.number:  # the first one compiles
            counted[burst.contender].append(burst)
            put(burst.contender)
    for name, failure in race.errors.items():
        bench.put(name, {"contender": name, "error": message(failure)})
    for name in race.losses:
        difference = largest_difference(race.losses[name], race.losses[_BY_HAND])
        put(name, loss_difference=difference)


def summary(bursts: Sequence[Burst], reference: Sequence[Burst], case: Case) -> Row:
    """Return the speed of a contender, and its ratios to the reference in the same bursts."""
    seconds = median(burst.seconds for burst in bursts)
    ratios = [one.seconds / other.seconds for one, other in zip(reference, bursts, strict=False)]
    return {
        "compile": case.training.compile,
        "micro_batch": case.micro_batch,
        "accumulation": case.accumulation,
        "bursts": len(bursts),
        "step_time_s": seconds / LOG_EVERY,
        "tokens_per_s": LOG_EVERY * case.effective_batch * case.units / seconds,
        "ratio": median(ratios) if ratios else None,
        "ratio_low": min(ratios, default=None),
        "ratio_high": max(ratios, default=None),
        "cpu_s": median(burst.cpu_seconds for burst in bursts) / LOG_EVERY,
        "steps_bytes": bursts[-1].peak_bytes,
        "seconds": [burst.seconds for burst in bursts],
    }
