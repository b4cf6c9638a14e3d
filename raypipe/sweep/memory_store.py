"""Store of memory measurements between runs: a JSON file per device and group."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import PositiveInt

from raypipe.config.settings import Settings
from raypipe.pipeline.identity import fingerprint
from raypipe.storage.run_directory import RunDirectory, cache_directory
from raypipe.sweep.memory_model import Measurements

log = logging.getLogger(__name__)


class _Record(Settings):
    """Contents of a file: the measurements, and a description of the group for readers."""

    device: str
    group: str
    torch: str
    description: dict[str, Any]
    peak_bytes: dict[PositiveInt, PositiveInt]
    ran_out: tuple[PositiveInt, ...]


def load(device: str, group: str) -> Measurements:
    """Return the measurements of earlier runs for a group on a device, possibly none.

    A file that cannot be read is reported and kept until it is rewritten.
    """
    path = _path(device, group)
    try:
        record = _Record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Measurements()
    except (OSError, ValueError) as error:
        log.warning("%s: ignored, since it is damaged: %s", path, error)
        return Measurements()
    return Measurements(record.peak_bytes, frozenset(record.ran_out))


def save(device: str, group: str, measured: Measurements, description: Mapping[str, Any]) -> None:
    """Merge the measurements of a run (``MemoryModel.measured``) into the stored ones.

    The newest measurement wins. ``description`` has plain values that tell readers what the group
    is: model, precision, checkpointing. If the folder cannot be written, a warning is printed and
    later runs lack the presets.
    """
    path = _path(device, group)
    try:
        with FileLock(path.with_suffix(".lock"), fallback_to_soft=False):
            merged = load(device, group).corrected_by(measured)
            record = _Record(
                device=device,
                group=group,
                torch=version("torch"),
                description=dict(description),
                peak_bytes=dict(sorted(merged.peaks.items())),
                ran_out=tuple(sorted(merged.failed)),
            )
            folder = RunDirectory.at(path.parent)  # writes are atomic
            folder.write(folder.path(path.name), record.model_dump_json(indent=2).encode())
    except OSError as error:
        log.warning("%s: the memory measurements cannot be kept: %s", path, error)


def _path(device: str, group: str) -> Path:
    """Return the path of a group's file; its hash keeps similar names apart."""
    folder = cache_directory() / "memory"
    readable = re.sub(r"[^A-Za-z0-9]+", "-", device)[:64].strip("-")
    return folder / f"{readable}-{fingerprint([device, group])[:16]}.json"
