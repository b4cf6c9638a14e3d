"""Run directory: its file names, and atomic reading and writing of its files.

A run directory is a local path or a URI that pyarrow's file systems open (``s3://``,
``gs://``). A file appears whole under its name or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import IO

import pyarrow as pa
from pyarrow import fs as arrow_fs

from raypipe.errors import ConfigError, named
from raypipe.redaction import without_credentials

#: the variant of stages that all points of a matrix share
BASE = "base"

#: suffix of a file that ``RunDirectory.write`` has not completed, or of the folder of a call
UNFINISHED = re.compile(r".+\.\d+-[0-9a-f]{8}\.tmp")
#: attempts to list a folder that changes, before the last one
_MOST_LISTINGS = 10
#: bytes of the name of a log or of a call's folder
_LONGEST_NAME = 200
#: seconds after which a process that survived its command writes no more
_WRITING_S = 60


def _place(name: str) -> cached_property[str]:
    """Return a property with the path of a file or folder."""
    return cached_property(lambda run: run.path(name))


@dataclass(frozen=True)
class RunDirectory:
    """A run directory by its location; cheap to pickle, opened on use.

    ``variant`` and ``variants`` (of each needed stage) are those of a stage of a matrix. They
    become part of the names of models, checkpoints, artifacts and partitions.
    """

    location: str = field(repr=False)
    variant: str = BASE
    variants: tuple[tuple[str, str], ...] = ()

    @classmethod
    def at(cls, location: str | Path) -> RunDirectory:
        """Return the run directory at a path (made absolute) or a URI. Raises ConfigError."""
        text = str(location)
        scheme, separator, rest = text.partition("://")
        if separator:
            found = f"{scheme}://{rest.rstrip('/')}"
        else:
            try:
                found = str(Path(text).expanduser().resolve())
            # circular links, unknown home
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigError(f"--run-dir {text!r}: is not a valid path: {error}") from error
        try:
            found.encode()
        except UnicodeEncodeError as error:
            shown = without_credentials(found)
            raise ConfigError(f"--run-dir {shown!r}: must be UTF-8 text") from error
        return cls(found)

    @classmethod
    def new(cls, runs: str, experiment: str) -> RunDirectory:
        """Return a new run directory ``<runs>/<experiment>/<timestamp>-<short id>``."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        return cls.at(f"{runs.rstrip('/')}/{experiment}/{stamp}-{secrets.token_hex(2)}")

    def inside(self, name: str) -> RunDirectory:
        """Return the folder ``name`` inside as a run directory; it shares the open file system."""
        base, separator, query = (
            self.location.partition("?") if "://" in self.location else (self.location, "", "")
        )
        found = RunDirectory(f"{base}/{name}{separator}{query}")
        found.__dict__["_opened"] = (self.fs, self.path(name))
        return found

    @cached_property
    def _opened(self) -> tuple[arrow_fs.FileSystem, str]:
        if "://" not in self.location:
            return arrow_fs.LocalFileSystem(), self.location
        try:
            filesystem, root = arrow_fs.FileSystem.from_uri(self.location)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = without_credentials(str(error))  # Arrow's message repeats the location
            raise ConfigError(f"--run-dir {self.shown}: cannot be opened: {reason}") from None
        return filesystem, root

    @property
    def shown(self) -> str:
        """The location without credentials, for messages and files."""
        return without_credentials(self.location)

    @property
    def fs(self) -> arrow_fs.FileSystem:
        """The file system of the directory."""
        return self._opened[0]

    @property
    def is_local(self) -> bool:
        """Whether it is a path on this machine or on a mounted file system."""
        return isinstance(self.fs, arrow_fs.LocalFileSystem)

    def path(self, *parts: str) -> str:
        """Return the path of a file inside, as ``fs`` expects it."""
        for part in parts:
            if ".." in part.split("/") or not part.isprintable():
                raise ConfigError(f"{part!r}: cannot be a path in a run directory")
        return "/".join((self._opened[1], *parts))

    # paths

    #: the resolved configuration of the newest command
    config = _place("config.yaml")
    #: the report of the newest command, for those who look at the run from elsewhere
    status = _place("status.json")
    #: what its user says of the run, which may change at any time
    notes = _place("notes.json")
    #: the folder of the durable record of finished units
    ledger = _place("ledger")
    #: the folder of the report
    report = _place("report")
    #: the folder of the log files
    logs = _place("logs")
    #: the folder of the trackers' files
    tracking = _place("tracking")
    #: the file whose lock makes a command the only writer
    lock = _place(".lock")

    def code(self, fingerprint: str) -> str:
        """Return the path of the source files with this fingerprint, which computed results."""
        return self.path("code", f"{_file_name(fingerprint)}.json")

    def table(self, table: str) -> str:
        """Return the folder of a results table."""
        return self.path("results", _file_name(table, is_unique=True))

    def partition(self, table: str, name: str = "data") -> str:
        """Return the path of one Parquet file of a results table.

        Of a table that is written as a whole, each variant has a file.
        """
        if name == "data" and self.variant != BASE:
            name = self.variant
        return f"{self.table(table)}/{_file_name(name)}.parquet"

    def trial_id(self, unit: str) -> str:
        """Return the name of a unit's training run in tables and files.

        It is the unit's key; in a matrix, its stage is followed by ``@`` and the variant.
        """
        stage, separator, rest = unit.partition("/")
        variant = dict(self.variants).get(stage, BASE)
        return f"{variant_name(stage, variant)}{separator}{rest}"

    def checkpoints(self, unit: str) -> str:
        """Return the folder of a training run's checkpoints, by its unit or trial."""
        return self.path("checkpoints", _file_name(self.trial_id(unit)))

    def model(self, unit: str) -> str:
        """Return the path of a training run's weights, by its unit or trial."""
        return self.path("models", f"{_file_name(self.trial_id(unit))}.safetensors")

    def artifact(self, stage: str, *parts: str) -> str:
        """Return the path of a file or folder that a stage leaves for later stages."""
        return self.path("artifacts", _file_name(self.trial_id(stage)), *parts)

    def log(self, unit: str) -> str:
        """Return the path of the log of a unit, task or trial, whatever its name has in it."""
        return self.path("logs", f"{_file_name(unit)}.log")

    def call_files(self, unit: str) -> str:
        """Return the folder of the files that a call wrote; each call has its own folder."""
        stage, _, call = self.trial_id(unit).partition("/")
        names = (_file_name(name, is_unique=True) for name in (stage, call))
        return self.path("files", *names)

    # files

    def check(self) -> None:
        """Raise ConfigError if the directory cannot be read; a missing one is accepted."""
        ledger = self.ledger  # it opens the file system, whose error says more
        try:
            self.list(ledger)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--run-dir {self.shown}: cannot be read: {error}") from error

    def check_new(self) -> None:
        """Raise ConfigError if it is a file, or a folder with other files than those of a run.

        Hidden files and YAML files do not count: a configuration may lie in its run directory.
        """
        self.check()
        if self.is_file:
            raise ConfigError(f"--run-dir {self.shown}: is a file, not a directory")
        names = self.list(self.path())
        # unfinished files are those of another command that shares the run
        others = [
            name
            for name in names
            if not name.startswith(".") and not name.endswith((".yaml", ".yml"))
            if not UNFINISHED.fullmatch(name)
        ]
        if others and not is_run(names):
            raise ConfigError(
                f"--run-dir {self.shown}: is not a run directory and has other files "
                f"({named(others)}); use an empty or a new directory"
            )

    @property
    def is_file(self) -> bool:
        """Whether there is a file, and not a directory, at the location."""
        return bool(self.fs.get_file_info(self.path()).is_file)

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder at ``path``."""
        return bool(self.fs.get_file_info(path).type != arrow_fs.FileType.NotFound)

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; empty if the folder is missing."""
        return sorted(info.base_name for info in self.infos(folder))

    def infos(self, folder: str, *, recursive: bool = False) -> tuple[arrow_fs.FileInfo, ...]:
        """Return what is in a folder, with types and sizes; empty if the folder is missing."""
        selector = arrow_fs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        for _ in range(_MOST_LISTINGS):
            # Arrow raises the error if another process creates or deletes a folder meanwhile
            with suppress(FileNotFoundError):
                return tuple(self.fs.get_file_info(selector))
        return tuple(self.fs.get_file_info(selector))

    def read(self, path: str) -> bytes:
        """Return the content of a file. Raises OSError: it is missing, or no regular file."""
        if self.is_local and Path(path).exists() and not Path(path).is_file():
            raise OSError(f"{path}: is not a regular file")  # a pipe or a device may never end
        with self.fs.open_input_stream(path) as stream:
            return bytes(stream.read())

    def write(self, path: str, content: bytes, *, durable: bool = True) -> None:
        """Write a file atomically: readers see the old content or the new.

        A durable one is also there after a power failure.
        """
        with self.writing(path, durable=durable) as stream:
            stream.write(content)

    @contextmanager
    def writing(self, path: str, *, durable: bool = True) -> Iterator[IO[bytes]]:
        """Yield a stream to a file, which ``write`` describes; it appears at the end of the body.

        On an object store it may also appear, incomplete, after an error in the body.
        """
        folder = path.rpartition("/")[0]
        if not self.is_local:
            # an object becomes visible once it is complete
            self.fs.create_dir(folder, recursive=True)
            with self.fs.open_output_stream(path) as stream:
                yield stream
            return
        make_folder(folder)
        temporary = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with Path(temporary).open("wb") as stream:
                yield stream
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        if durable:
            sync(folder)

    def append(self, path: str, content: bytes) -> None:
        """Append to a file, such as a log; neither durable nor, on an object store, atomic."""
        if self.is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with Path(path).open("ab") as stream:
                stream.write(content)
        else:
            self.write(path, (self.read(path) if self.exists(path) else b"") + content)

    def remove_unfinished(self) -> None:
        """Remove incomplete files that killed processes left."""
        for path in Path(self.path()).rglob("*.tmp"):
            with suppress(OSError):  # its writer is alive and has just renamed it
                old = time.time() - path.stat().st_mtime > _WRITING_S
                if old and UNFINISHED.fullmatch(path.name):
                    path.unlink()

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with its content; a missing one is ignored."""
        found = self.fs.get_file_info(path)
        if found.is_file:
            self.fs.delete_file(path)
        elif found.type == arrow_fs.FileType.Directory:
            self.fs.delete_dir(path)


def is_run(names: Collection[str]) -> bool:
    """Whether a folder with files and folders of these names is a run directory."""
    return "ledger" in names or "status.json" in names


def variant_name(name: str, variant: str) -> str:
    """Return the name of a stage, unit or row of a variant: ``name@variant``."""
    return name if variant == BASE else f"{name}@{variant}"


def make_folder(folder: str | Path) -> None:
    """Create a local folder and its parents durably."""
    path = Path(folder)
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: str | Path) -> None:
    """Make a local file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _file_name(name: str, *, is_unique: bool = False) -> str:
    """Return a file name for any text; one that ``is_unique`` is of no other text."""
    plain = "".join(c if c.isprintable() and c != "/" else "-" for c in name).lstrip(".")
    if len(plain.encode()) > _LONGEST_NAME or (is_unique and plain != name):
        plain = plain[: _LONGEST_NAME // 8] + "-" + hashlib.sha256(name.encode()).hexdigest()[:12]
    return plain or "-"
