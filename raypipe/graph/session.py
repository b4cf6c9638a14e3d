"""Session: what all stages of a command share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import BaseModel

from raypipe.config.settings import Settings
from raypipe.graph.progress import Display
from raypipe.graph.tables import CORE
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Table, by_name

if TYPE_CHECKING:
    from raypipe.graph.durations import Durations
    from raypipe.graph.launcher import Launcher
    from raypipe.hardware import Hardware
    from raypipe.integrations.tracking import Trackers


@dataclass(frozen=True)
class Session:
    """State that all stages of a command share.

    ``command_id`` refers to the command's rows in the table ``environment``; ``code`` is the
    fingerprint of the experiment's source. ``durations`` remembers what stages took.
    """

    run_dir: RunDirectory
    run_id: str
    ledger: Ledger
    launcher: Launcher
    display: Display
    nodes: Sequence[Hardware]
    trackers: Trackers
    settings: BaseModel = field(default_factory=Settings)
    tables: Mapping[str, Table] = field(default_factory=lambda: by_name(CORE))
    command_id: str = ""
    code: str = ""
    durations: Durations | None = None
