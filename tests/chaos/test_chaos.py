"""Three rounds of chaos; ``make chaos`` runs fifty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.rounds import run_rounds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_disturbed_runs_end_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray's default: with the tests' ten minutes, an agent that was starting when its cluster was
    # killed waits longer than the test does for it to end
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "60")
    chosen = ("driver_killed", "node_lost", "checkpoint_cut")
    counts, failures = run_rounds(range(3), 59, tmp_path, chosen, most=1, jobs=3)
    assert counts.total() == 3
    assert failures["worker_died"] > 0
    assert failures["invalid_value"] == 1  # the trial that diverges, once in a run with a sweep
