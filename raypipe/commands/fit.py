"""``raypipe fit``: find the largest micro-batch of each precision that fits this device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory

from raypipe import faults
from raypipe.commands import cluster
from raypipe.commands.configuration import resolve
from raypipe.commands.run import announce
from raypipe.commands.selection import check_gpus
from raypipe.config.document import Document
from raypipe.graph.context import Session
from raypipe.graph.progress import Display
from raypipe.integrations.tracking import Trackers
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import RunDirectory, cache_directory
from raypipe.study.largest_batch import fit_stage, fitting


def fit(
    document: Document,
    overrides: Sequence[str],
    profile: str = "auto",
    address: str | None = None,
    stage: str | None = None,
) -> list[Row]:
    """Return a row per training stage and precision."""
    faults.from_environment()
    cache_directory()  # report a wrong name before anything starts
    rows: list[Row] = []
    with ExitStack() as stack:
        launcher = cluster.attach(address, stack)
        nodes = cluster.hardware_of(launcher)
        configuration = resolve(document, overrides, profile, nodes)
        check_gpus(configuration, nodes, [s for s in configuration.stages() if s.training])
        makers = fitting(configuration, stage, nodes)
        folder = stack.enter_context(TemporaryDirectory(prefix="raypipe-fit-"))
        run_dir, name = RunDirectory.at(folder), configuration.experiment.name
        display = stack.enter_context(Display())
        announce(display, configuration, nodes)
        if launcher is None:
            display.prepare(f"starting Ray on {nodes[0].cpus} CPUs")
            launcher = cluster.start(stack, configuration.source().modules)
        trackers = stack.enter_context(Trackers((), run_dir, "fit", name, {}))
        session = Session(run_dir, "fit", Ledger(run_dir), launcher, display, nodes, trackers)
        for maker in makers:
            rows += fit_stage(maker, session)
    return rows
