"""``raypipe plan``: the stages and units that a run would compute; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raypipe import hardware
from raypipe.commands.configuration import read, resolve
from raypipe.commands.selection import stages_of
from raypipe.pipeline.context import is_done
from raypipe.pipeline.runner import refuse_changes
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


def plan(path: str, overrides: Sequence[str], *, run_dir: str | None, profile: str) -> pd.DataFrame:
    """Return a row per stage: its units, how many are finished, and their workload."""
    import pandas as pd

    document = read(path)
    nodes = [hardware.detect()]
    configuration = resolve(document, overrides, profile, nodes)
    stages = stages_of(configuration, (), nodes)
    ledger = None
    if run_dir is not None:
        run = RunDirectory.at(run_dir)
        run.check()
        ledger = Ledger(run, writable=False)
        refuse_changes(ledger, stages, run.shown)
    rows = []
    for stage in stages:
        done = [unit for unit in stage.units if ledger is not None and is_done(ledger, unit)]
        rows.append(
            {
                "stage": stage.name,
                "needs": ", ".join(stage.needs),
                "units": len(stage.units),
                "done": len(done),
                "to do": len(stage.units) - len(done),
                "workload": stage.workload,
            }
        )
    return pd.DataFrame(rows)
