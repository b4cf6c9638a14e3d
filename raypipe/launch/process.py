"""Actor of the actor pool, in a module without torch, which takes seconds to import."""

from __future__ import annotations

from typing import Any

import ray

from raypipe.graph.launcher import TaskResult
from raypipe.launch.output import run_captured


class TaskProcess:
    """Ray actor that runs tasks in sequence."""

    def node(self) -> str:
        """Return the ID of the actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, *arguments: Any) -> TaskResult:
        """Run a task and capture its output."""
        return run_captured(*arguments)
