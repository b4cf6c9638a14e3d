"""Sweeps in this process, as the tests of several modules run them."""

from __future__ import annotations

from pathlib import Path

from raypipe.commands import configuration as config
from raypipe.commands.configuration import declared
from raypipe.graph.experiment import Stage
from raypipe.graph.runner import GraphRunner
from raypipe.graph.stored_results import resume
from raypipe.hardware import Hardware
from raypipe.study.sweep import with_sweep
from tests.raypipe.composed import HERE, session_in


def stages_of(text: str, overrides: tuple[str, ...] = (), node: Hardware = HERE) -> list[Stage]:
    """The stages of a configuration on a node."""
    configuration = config.resolve(config.parse(text, "c.yaml"), overrides, "auto", [node])
    return with_sweep(configuration, [node])


def sweep(
    text: str, folder: Path, overrides: tuple[str, ...] = (), node: Hardware = HERE
) -> str | None:
    """Run the stages of a configuration in a run directory; what failed."""
    stages = stages_of(text, overrides, node)
    tables = declared(config.load_experiment("example_sweep", text))
    session = session_in(folder, node=node, tables=tables)
    resume(session.run_dir, session.ledger, {}, lambda _: (stages, True))
    return GraphRunner(session).run(stages)
