"""Two workers for all tests of trainings that need more than one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from example_tasks import worker_group


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Call a function of the rank in each of two processes; see ``worker_group``."""
    with worker_group(2, tmp_path_factory.mktemp("group")) as call:
        yield call
