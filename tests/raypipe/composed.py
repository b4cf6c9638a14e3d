"""Stages of tests that belong to no experiment, with the identities that they would have."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.config.settings import Settings
from raypipe.graph import runner
from raypipe.graph.configuration import compose
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.session import Session
from raypipe.store.ledger import Ledger

NOTHING = Experiment("nothing", 1, Settings, lambda settings: [])


def composed(stages: Sequence[Stage]) -> list[Stage]:
    return compose(NOTHING, Settings(), stages)


def run_stages(stages: Sequence[Stage], session: Session) -> str | None:
    return runner.run_stages(composed(stages), session)


def refuse_changes(ledger: Ledger, stages: Sequence[Stage], where: str) -> None:
    runner.refuse_changes(ledger, composed(stages), where)
