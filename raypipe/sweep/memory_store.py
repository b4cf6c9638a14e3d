"""Store of memory measurements between runs: a JSON file per device and group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from raypipe.config.settings import Settings
from raypipe.pipeline.identity import fingerprint
from raypipe.storage import shared_record
from raypipe.storage.run_directory import cache_directory
from raypipe.sweep.memory_model import Measurements


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
    return _measurements(shared_record.read(_path(device, group), _Record))


def save(device: str, group: str, measured: Measurements, description: Mapping[str, Any]) -> None:
    """Merge the measurements of a run (``MemoryModel.measured``) into the stored ones.

    The newest measurement wins. ``description`` has plain values that tell readers what the group
    is: model, precision, checkpointing. If the folder cannot be written, a warning is printed and
    later runs lack the presets.
    """

    def merged(known: _Record | None) -> _Record:
        found = _measurements(known).corrected_by(measured)
        return _Record(
            device=device,
            group=group,
            torch=version("torch"),
            description=dict(description),
            peak_bytes=dict(sorted(found.peaks.items())),
            ran_out=tuple(sorted(found.failed)),
        )

    shared_record.update(_path(device, group), _Record, merged, "memory measurements")


def _measurements(record: _Record | None) -> Measurements:
    return Measurements(record.peak_bytes, frozenset(record.ran_out)) if record else Measurements()


def _path(device: str, group: str) -> Path:
    """Return the path of a group's file; its hash keeps similar names apart."""
    folder = cache_directory() / "memory"
    readable = re.sub(r"[^A-Za-z0-9]+", "-", device)[:64].strip("-")
    return folder / f"{readable}-{fingerprint([device, group])[:16]}.json"
