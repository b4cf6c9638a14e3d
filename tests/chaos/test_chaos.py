"""Three rounds of chaos; ``make chaos`` runs fifty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import disturbances
from tests.chaos.rounds import run_rounds


@pytest.mark.slow
def test_a_disturbed_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    chosen = (
        disturbances.driver_killed,
        disturbances.worker_killed,
        disturbances.raylet_killed,
        disturbances.ledger_torn,
        disturbances.checkpoint_cut,
    )
    counts = run_rounds(range(3), 0, tmp_path, chosen, most=1)
    assert counts.total() >= 2
