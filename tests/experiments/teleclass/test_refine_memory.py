"""Phase 2 of a million documents fits into the memory of a laptop."""

from __future__ import annotations

import pytest

from benchmarks.teleclass import measure_refine


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_with_the_documents():
    rows = measure_refine([100_000, 1_000_000])["rows"]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks[1] < min(4e9, 2 * peaks[0])
