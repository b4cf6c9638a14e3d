"""The run that trackers copy, and the servers that the user's environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raypipe.stats import finite_or_none

if TYPE_CHECKING:  # loading pyarrow takes as long as all of ``raypipe --help``
    from raypipe.store.run_directory import RunDirectory

Setting = str | bool | int | float


@dataclass(frozen=True)
class Target:
    """The raypipe run that trackers copy; ``configuration`` is flat, without secrets."""

    run: RunDirectory
    run_id: str
    experiment: str
    configuration: Mapping[str, Setting]


def finite_numbers(row: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, which are its metrics."""
    return {
        name: number for name, value in row.items() if (number := finite_or_none(value)) is not None
    }


def mlflow_server() -> str | None:
    """Return the server that the user's environment names."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def wandb_is_offline() -> bool:
    """Whether W&B writes local files, as it does unless the user's environment says otherwise."""
    return (os.environ.get("WANDB_MODE") or "offline") in ("offline", "dryrun")
