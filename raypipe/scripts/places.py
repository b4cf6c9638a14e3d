"""Folders of a script: its output, its checkpoints and its log, also for a remote run directory."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from pyarrow import fs as arrow_fs

from raypipe.store.run_directory import make_folder
from raypipe.training.job import TrainingJob

#: seconds between copies of new checkpoints to a remote run directory
_COPY_S = 60.0
#: name of the folder of checkpoints: this, and digits of the job's identity
_PREFIX, _DIGITS = "identity-", 12


class Places:
    """Context manager of the local folders of a script's attempt.

    They are in the run directory if that is local, else temporary ones whose content is copied:
    checkpoints about every minute, everything at the end. Those of a measured trial are deleted.

    Checkpoints lie in a folder for the job's identity: after an edit of the script, or with another
    setting, it begins without those of the earlier one.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._run, self._measured = job.run_dir, job.measured
        self._log_name = f"{job.trial_id.replace('/', '-')}.log"
        self._output = job.run_dir.artifact(job.trial_id)
        folder = job.run_dir.checkpoints(job.trial_id)
        self._checkpoints = f"{folder}/{_PREFIX}{job.identity[:_DIGITS]}"
        self._stack = TemporaryDirectory(prefix="raypipe-script-")
        self._copied: dict[Path, tuple[int, int]] = {}
        self._seen: dict[Path, tuple[int, int]] = {}
        self._next_copy = time.monotonic() + _COPY_S

    def __enter__(self) -> Places:
        """Create the folders, with the checkpoints of earlier attempts."""
        folder = Path(self._stack.name)
        local = self._run.is_local
        kept = local and not self._measured
        self.output = Path(self._output) if kept else folder / "output"
        self.checkpoints = Path(self._checkpoints) if kept else folder / "checkpoints"
        self.log = Path(self._run.logs) / self._log_name if local else folder / self._log_name
        for each in (self.output, self.checkpoints, self.log.parent):
            make_folder(each)
        if not local and not self._measured:
            for remote, here in self._pairs():
                if self._run.exists(remote):
                    arrow_fs.copy_files(
                        remote,
                        str(here),
                        source_filesystem=self._run.fs,
                        destination_filesystem=arrow_fs.LocalFileSystem(),
                    )
            if self._run.exists(log := f"{self._run.logs}/{self._log_name}"):
                self.log.write_bytes(self._run.read(log))
            self._copied = _states(self.output) | _states(self.checkpoints)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Copy everything to a remote run directory, and delete temporary folders."""
        try:
            if not self._run.is_local:
                if not self._measured:
                    for remote, here in self._pairs():
                        self._copy(here, remote, _states(here))
                self._run.write(f"{self._run.logs}/{self._log_name}", self.log.read_bytes())
        finally:
            self._stack.cleanup()

    @property
    def newest_checkpoint(self) -> Path | None:
        """The newest file or folder of the checkpoints; None if there is none."""
        found = [path for path in self.checkpoints.iterdir() if not path.name.startswith(".")]
        return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)

    def keep(self) -> None:
        """Copy checkpoints that are complete, if it is time and the run directory is remote.

        A file is taken to be complete if it has not changed since the last look.
        """
        if self._run.is_local or self._measured or time.monotonic() < self._next_copy:
            return
        states = _states(self.checkpoints)
        still = {path: state for path, state in states.items() if self._seen.get(path) == state}
        self._copy(self.checkpoints, self._checkpoints, still)
        self._seen, self._next_copy = states, time.monotonic() + _COPY_S

    def _pairs(self) -> tuple[tuple[str, Path], ...]:
        return (self._output, self.output), (self._checkpoints, self.checkpoints)

    def _copy(self, folder: Path, remote: str, states: dict[Path, tuple[int, int]]) -> None:
        for path, state in states.items():
            if self._copied.get(path) != state:
                target = f"{remote}/{path.relative_to(folder).as_posix()}"
                self._run.fs.create_dir(target.rpartition("/")[0], recursive=True)
                with path.open("rb") as source, self._run.fs.open_output_stream(target) as sink:
                    while chunk := source.read(2**22):
                        sink.write(chunk)
                self._copied[path] = state


def _states(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size and the time of change of each file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            stat = path.stat()
            found[path] = (stat.st_size, stat.st_mtime_ns)
    return found
