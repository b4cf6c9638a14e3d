"""Output of a sweep's recommendation: on the terminal, and as a configuration file."""

from __future__ import annotations

from pathlib import Path

from raypipe.commands.request import Request
from raypipe.errors import ConfigError
from raypipe.pipeline.configuration import Configuration
from raypipe.storage.ledger import Ledger
from raypipe.sweep.recommendation import snippet
from raypipe.sweep.stage import NAME as SWEEP


def print_recommendation(request: Request, configuration: Configuration, ledger: Ledger) -> None:
    """Print the sweep's recommendation; write it as a configuration if ``--write`` asks for it."""
    settings = configuration.settings.sweep
    if request.command != "sweep" or settings is None:
        return
    row = ledger.get("recommendations", settings.stage)
    if row is None:
        print("nothing is recommended: no point succeeded with losses that agree", flush=True)
        return
    print(row["snippet"], flush=True)
    if request.write is not None:
        chosen = {**row["settings"], f"{settings.stage}.from_sweep": False, SWEEP: None}
        text = snippet(configuration.with_values(chosen, "the sweep").resolved(), row["reason"])
        try:
            Path(request.write).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {request.write}: cannot be written: {error}") from error
