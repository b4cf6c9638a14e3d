"""Process for many tasks; it imports this module only, since torch takes seconds to load."""

from __future__ import annotations

from typing import Any

import ray

from raypipe.launch.task import run_task
from raypipe.pipeline.launcher import TaskResult


class TaskProcess:
    """A Ray actor that runs one task after the other."""

    def node(self) -> str:
        """Which node it is on."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, *arguments: Any) -> TaskResult:
        """``run_task``, here."""
        return run_task(*arguments)
