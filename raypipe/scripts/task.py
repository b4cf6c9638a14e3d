"""Task of a script: what a training job needs to run it on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.scripts import files
from raypipe.training.job import ExternalTask

if TYPE_CHECKING:
    from raypipe.training.ending import Ending
    from raypipe.training.job import Report, TrainingJob


@dataclass(frozen=True)
class ScriptTask(ExternalTask):
    """A script as a training task.

    Args:
        directory: where the command runs, on nodes that have it; else their own directory.
        hashes: the hash of each file that decides the result.
        parameters: the parameters by dotted name.
        used: the names of the values that reach the script.
        unused: the settings that do not, which ``trials`` does not show.

    """

    directory: str
    hashes: Mapping[str, str]
    parameters: Mapping[str, Any]
    used: frozenset[str]
    unused: frozenset[str]

    def run(self, job: TrainingJob, report: Report, ending: Ending) -> dict[str, Any]:
        """Run the script to its end.

        Raises:
            ValueError: a file is not the one that the training's identity holds.
            FloatingPointError: the loss is no longer finite.
            UnitError: the script failed, with the kind of failure.

        """
        from raypipe.scripts.runner import ScriptRun

        directory = Path(self.directory)
        if not directory.is_dir():
            directory = Path.cwd()
        files.check_unchanged(self.hashes, directory)
        return ScriptRun(job, self.parameters, self.used, report).run(directory, ending)

    def columns(self) -> Mapping[str, Any]:
        """Return the parameters as ``param_NAME``, and no settings that the script ignores."""
        own = {f"param_{name.replace('.', '_')}": value for name, value in self.parameters.items()}
        return {**dict.fromkeys(self.unused), **own}
