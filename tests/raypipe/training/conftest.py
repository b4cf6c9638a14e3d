"""Two workers for all tests of trainings that need more than one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any

import pytest
from example_tasks import worker_group


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Call a function of the rank in each of two processes; see ``worker_group``.

    After an error, or a crash in torch, the next call has other processes.
    """
    with ExitStack() as stack:
        groups: list[Callable[..., list[Any]]] = []

        def call(member: Callable[..., Any], *arguments: Any) -> list[Any]:
            if not groups:
                folder = tmp_path_factory.mktemp("group")
                groups.append(stack.enter_context(worker_group(2, folder)))
            try:
                return groups[0](member, *arguments)
            except BrokenProcessPool:
                groups.clear()
                raise

        yield call
