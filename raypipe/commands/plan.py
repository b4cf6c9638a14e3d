"""``raypipe plan``: the stages and units that a run would compute; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raypipe import hardware
from raypipe.commands.configuration import read, resolve
from raypipe.commands.selection import selected
from raypipe.pipeline.context import is_done
from raypipe.pipeline.experiment import Stage
from raypipe.pipeline.matrix import refuse_other_axes
from raypipe.pipeline.runner import refuse_changes
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


def plan(
    path: str, overrides: Sequence[str], *, run_dir: str | None, profile: str, yes: bool = False
) -> pd.DataFrame:
    """Return a row per stage: its units, how many are finished, and their workload."""
    import pandas as pd

    document = read(path)
    nodes = [hardware.detect()]
    configuration = resolve(document, overrides, profile, nodes)
    graph = selected(configuration, (), nodes, confirmed=yes)
    stages = graph.stages
    ledger = None
    if run_dir is not None:
        run = RunDirectory.at(run_dir)
        run.check()
        ledger = Ledger(run, writable=False)
        refuse_other_axes(ledger, configuration, run.shown)
        refuse_changes(ledger, stages, run.shown)
    rows = []
    for name in dict.fromkeys(stage.name for stage in stages):
        of_name = [stage for stage in stages if stage.name == name]
        units = sum(len(stage.units) for stage in of_name)
        done = sum(_finished(stage, ledger) for stage in of_name)
        workloads = list(dict.fromkeys(stage.workload for stage in of_name))
        rows.append(
            {
                "stage": name,
                "needs": ", ".join(of_name[0].needs),
                **({"variants": len(of_name)} if graph.variants else {}),
                "units": units,
                "done": done,
                "to do": units - done,
                "workload": workloads[0] + (" (varied)" if len(workloads) > 1 else ""),
            }
        )
    return pd.DataFrame(rows)


def _finished(stage: Stage, ledger: Ledger | None) -> int:
    if ledger is None:
        return 0
    seen = stage.seen(ledger)
    return sum(is_done(seen, unit) for unit in stage.units)
