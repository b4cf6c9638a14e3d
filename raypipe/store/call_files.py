"""Files that calls of a function write: their folder while a call runs, and as part of the run.

A worker writes to a separate folder, which is not yet a result. Once the call has succeeded, the
folder is renamed to that of the call in the run directory, or copied to it in an object store.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raypipe.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from raypipe.store.run_directory import RunDirectory

#: the column with the names of a call's files
FILES = "files"


def output_dir() -> Path:
    """Return the folder for the files of the present call, made on first use.

    What lies in it when a call of ``raypipe map`` has succeeded becomes part of the run, in
    ``RUN_DIR/files/calls/<call>/``. A failed attempt leaves nothing.

    Raises:
        RuntimeError: there is no call in this thread and process.

    """
    files = _present.get()
    if files is None or (files.folder is None and files.process != os.getpid()):
        raise RuntimeError(
            "rp.output_dir() is the folder of a call of `raypipe map`, and there is no call in "
            "this thread and process: call it in the function itself, and give the folder to the "
            "threads and processes that it starts"
        )
    if files.folder is None:
        files.folder = files.make()
    return files.folder


@dataclass
class CallFiles:
    """The files of a call that runs in this process.

    Args:
        run: the fields of the run directory: only calls with files load pyarrow to open it.
        key: the unit of the call.

    """

    run: tuple[Any, ...]
    key: str
    folder: Path | None = None
    process: int = field(default_factory=os.getpid)

    def make(self) -> Path:
        """Make the folder: on the disk of the run, else on one of this node."""
        from raypipe.store.run_directory import RunDirectory, make_folder

        run = RunDirectory(*self.run)
        if not run.is_local:
            return Path(tempfile.mkdtemp(prefix="raypipe-"))
        path = f"{run.call_files(self.key)}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        make_folder(path)
        return Path(path)

    def finish(self) -> dict[str, list[str]]:
        """Make the files part of the run, in place of earlier ones; return their names, if any."""
        from raypipe.store.run_directory import RunDirectory, sync

        here = self.folder
        paths = [] if here is None else sorted(each for each in here.rglob("*") if each.is_file())
        if here is None or not paths:
            self.discard()
            return {}
        run = RunDirectory(*self.run)
        names, place = [str(path.relative_to(here)) for path in paths], run.call_files(self.key)
        run.delete(place)
        if run.is_local:
            for path in (*here.rglob("*"), here):
                target = path.resolve()
                if path.is_symlink() and target.is_relative_to(here.resolve()):  # which moves
                    path.unlink()
                    path.symlink_to(os.path.relpath(target, path.parent.resolve()))
                if path.is_file() or path.is_dir():
                    sync(path)
            here.rename(place)
            sync(Path(place).parent)
            return {FILES: names}
        for name in names:
            with (here / name).open("rb") as file, run.writing(f"{place}/{name}") as copy:
                shutil.copyfileobj(file, copy)
        self.discard()
        return {FILES: names}

    def discard(self) -> None:
        """Remove the folder."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


#: the call that runs in this thread
_present: ContextVar[CallFiles | None] = ContextVar("present", default=None)


@contextmanager
def of_call(run: tuple[Any, ...], key: str) -> Iterator[CallFiles]:
    """Run a call in the body, with its own ``output_dir``, of which an error leaves nothing."""
    files = CallFiles(run, key)
    before = _present.set(files)
    try:
        yield files
    except BaseException:
        files.discard()
        raise
    finally:
        _present.reset(before)


@contextmanager
def of_stage(run: RunDirectory, stage: str, *, is_alone: bool) -> Iterator[None]:
    """Run the calls of a stage in the body, and remove the folders of those that were killed.

    Others may be of commands that compute the stage, too, unless this one ``is_alone``.
    """
    from raypipe.store.run_directory import UNFINISHED

    try:
        yield
    finally:
        folder = Path(run.call_files(stage)).parent
        if is_alone and run.is_local and folder.is_dir():
            for path in folder.iterdir():
                if UNFINISHED.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)


def missing(run: RunDirectory, keys: Collection[str]) -> dict[str, str]:
    """Return the calls whose files their workers wrote to another disk, and what to do."""
    problem = (
        "its files are not in the run directory; use one on storage that all nodes share, or a URI"
    )
    return {key: problem for key in keys if run.is_local and not run.exists(run.call_files(key))}


@dataclass(frozen=True)
class RunFile:
    """A file that a call of a function wrote.

    Attributes:
        call: the name of the call, as in the table ``calls``.
        variant: the point of a matrix that the call is of, as there.
        name: its path in the folder of the call, such as ``curve.png``.

    """

    call: str
    variant: str
    name: str
    _place: RunDirectory = field(repr=False)

    @property
    def path(self) -> str:
        """Its path, or its URI in an object store."""
        return self._place.shown

    @property
    def is_linked(self) -> bool:
        """Whether it is a link, or below one: it may lie outside of the run directory."""
        return self._place.is_local and Path(self.path).resolve() != Path(self.path)

    def open(self) -> IO[bytes]:
        """Open it to read its bytes, wherever it lies."""
        stream: IO[bytes] = self._place.fs.open_input_file(self._place.path())
        return stream


def files_of(run: RunDirectory, calls: pd.DataFrame) -> list[RunFile]:
    """Return the files of calls, in the order of their rows in the table.

    Raises:
        ConfigError: a row has no names of files.

    """
    from raypipe.store.run_directory import variant_name

    found = list[RunFile]()
    # an experiment may have a table and a column of these names, too
    if FILES not in calls or not run.exists(run.path("files")):
        return found
    for row in calls[calls[FILES].notna()].to_dict("records"):
        call, variant = str(row["call"]), str(row["variant"])
        folder = run.call_files(f"{variant_name('calls', variant)}/{call}")
        inside = folder.removeprefix(f"{run.path()}/")
        try:
            names = list(map(str, json.loads(row[FILES])))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{run.shown}: calls.files is damaged at {call}: {error}") from error
        found += [RunFile(call, variant, n, run.inside(f"{inside}/{n}")) for n in names]
    return found
