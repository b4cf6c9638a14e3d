"""Stages of tests that belong to no experiment, with the identities that they would have."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.config.settings import Settings
from raypipe.graph import runner, stored_results
from raypipe.graph.configuration import compose
from raypipe.graph.context import Session
from raypipe.graph.experiment import Experiment, Stage

NOTHING = Experiment("nothing", 1, Settings, lambda settings: [])


def composed(stages: Sequence[Stage]) -> list[Stage]:
    return compose(NOTHING, Settings(), stages)


def run_stages(stages: Sequence[Stage], session: Session) -> str | None:
    return runner.run_stages(composed(stages), session)


def resume(session: Session, stages: Sequence[Stage]) -> None:
    ledger, asked = session.ledger, (composed(stages), True)
    stored_results.resume(session.run_dir, ledger, {}, lambda _: asked)
