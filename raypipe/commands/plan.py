"""``raypipe plan``: the stages and units that a run would compute; starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raypipe import hardware
from raypipe.commands.configuration import resolve
from raypipe.commands.selection import matrix_or_sweep, misfits, run_entry, selected
from raypipe.config.document import Document
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.progress import Durations, Estimate
from raypipe.graph.stored_results import is_done, resume
from raypipe.report.formatting import duration
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


def plan(
    document: Document,
    overrides: Sequence[str],
    run_dir: str | None = None,
    profile: str = "auto",
    only: Sequence[str] = (),
) -> pd.DataFrame:
    """Return a row per stage: its units, how many are finished, and their workload.

    What this machine cannot run is planned as well, since a cluster may; a line on stderr says so.
    """
    import pandas as pd

    nodes = [hardware.detect()]
    configuration, _ = matrix_or_sweep(resolve(document, overrides, profile, nodes), only)
    graph = selected(configuration, only, nodes)
    if misfit := misfits(configuration, graph, nodes):
        print(f"does not fit this machine: {misfit}", file=sys.stderr, flush=True)
    ledger = None
    if run_dir is not None:
        run = RunDirectory.at(run_dir)
        run.check_new()
        ledger = Ledger(run, writable=False)
        if ledger.damage:
            print(f"{run.shown}: the ledger is damaged: {ledger.damage}", file=sys.stderr)
        entries = {**run_entry(configuration), **graph.entries(ledger)}
        resume(run, ledger, entries, graph.known)
    stages = graph.at_most(ledger)
    if graph.variants and graph.text:
        print(graph.text)
    todo = {stage.key: _unfinished(stage, ledger) for stage in stages}
    expected = Durations(nodes).estimates((stage, todo[stage.key]) for stage in stages)
    rows = []
    for name in dict.fromkeys(stage.name for stage in stages):
        of_name = [(s, e) for s, e in zip(stages, expected, strict=True) if s.name == name]
        units = sum(len(stage.units) for stage, _ in of_name)
        left = sum(len(todo[stage.key]) for stage, _ in of_name)
        workloads = list(dict.fromkeys(stage.workload for stage, _ in of_name))
        row = {
            "stage": name,
            "needs": ", ".join(of_name[0][0].needs),
            **({"variants": len(of_name)} if graph.variants else {}),
            "units": units,
            "done": units - left,
            "to do": left,
            "workload": workloads[0] + (" (varied)" if len(workloads) > 1 else ""),
            **_cost([estimate for _, estimate in of_name]),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _unfinished(stage: Stage, ledger: Ledger | None) -> list[Unit]:
    if ledger is None:
        return list(stage.units)
    seen = stage.seen(ledger)
    return [unit for unit in stage.units if not is_done(seen, unit)]


def _cost(estimates: Sequence[Estimate | None]) -> dict[str, str]:
    """Return the expected time of stages one after the other."""
    known = [each for each in estimates if each is not None]
    if len(known) < len(estimates):
        return {"time": "unknown", "CPU h": "unknown", "GPU h": "unknown"}
    text = duration(sum(each.seconds for each in known))
    hours = (sum(each.cpu_s for each in known), sum(each.gpu_s for each in known))
    return {"time": text, "CPU h": f"{hours[0] / 3600:.3g}", "GPU h": f"{hours[1] / 3600:.3g}"}
