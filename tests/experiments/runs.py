"""Runs of the shipped configurations in this process, on the CPU and without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import raypipe as rp
from raypipe.commands import cluster, configuration
from raypipe.graph.configuration import Configuration
from raypipe.hardware import Hardware
from raypipe.launch.inline import InlineLauncher
from tests.command import table
from tests.scenario import cases

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
#: by configuration, overrides that make it small enough for tests
SMALL = cases(__file__, "small")


def run(config: str, folder: Path, *overrides: str, verb=rp.run, **options: object) -> int:
    """Return the exit status of a run of ``configs/<config>.yaml``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "start", lambda *_: InlineLauncher())
        given = {"profile": "cpu", "run_dir": folder, **options}
        try:
            verb(CONFIGS / f"{config}.yaml", overrides, **given)
        except rp.RunFailedError:
            return 1
    return 0


def small(config: str, files: Path, *more: str) -> list[str]:
    """Return overrides that make a configuration small, with the folder of the data, and more."""
    return [*(word.replace("{files}", str(files)) for word in SMALL[config]), *more]


def resolved(
    name: str, *overrides: str, profile: str = "cpu", nodes: Sequence[Hardware] = ()
) -> Configuration:
    """``configs/<name>.yaml`` with overrides, by default of the profile ``cpu``."""
    document = configuration.read(CONFIGS / f"{name}.yaml")
    return configuration.resolve(document, overrides, profile, nodes)


def assert_declared(folder: Path, tables, metrics=None) -> None:
    """Every declared table has its columns and no others; so have the metrics of an evaluation."""
    for declared in tables:
        found = {*table(folder, declared.name)} - {"run_id", "command_id", "variant"}
        assert found == {column.name for column in declared.columns}, declared.name
    if metrics is None:
        return
    logged = [name for name in table(folder, "steps") if name.startswith("eval_")]
    assert sorted(logged) == sorted(column.name for column in metrics)
