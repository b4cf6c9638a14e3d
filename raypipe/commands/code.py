"""Comparison of an experiment's source code with the code that computed the stored results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.errors import ConfigError
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage
from raypipe.pipeline.source import Source, source_of
from raypipe.storage.ledger import Ledger

_MOST_NAMED = 5


@dataclass(frozen=True)
class Code:
    """The source of this command's experiment."""

    source: Source
    fingerprint: str

    def record(self, ledger: Ledger) -> None:
        """Record the hashes of the modules, once for each state of the source."""
        if ledger.get("code", self.fingerprint) is None:
            ledger.put("code", {self.fingerprint: {"modules": dict(self.source.modules)}})


def check_code(
    ledger: Ledger, stages: Sequence[Stage], configuration: Configuration, *, strict: bool
) -> tuple[Code, str]:
    """Return the code, and a warning if it changed since stored units were computed.

    Raises:
        ConfigError: it changed, and ``strict`` refuses that.

    """
    source = source_of(configuration.module)
    code = Code(source, source.fingerprint)
    stored = {
        row.get("code")
        for stage in stages
        if not stage.always_rerun
        for unit in stage.units
        if (row := stage.seen(ledger).get("units", unit.key)) is not None
    }
    changed: set[str] = set()
    for earlier in stored - {code.fingerprint, None, ""}:
        modules = (ledger.get("code", str(earlier)) or {}).get("modules", {})
        changed |= set(source.changes(modules))
    if not changed:
        return code, ""
    names = ", ".join(sorted(changed)[:_MOST_NAMED])
    if len(changed) > _MOST_NAMED:
        names += f" and {len(changed) - _MOST_NAMED} more"
    message = f"the code changed since results were stored: {names}"
    if strict:
        raise ConfigError(
            f"--strict-code: {message}; raise `version` in the experiment and use another "
            "--run-dir, or leave --strict-code out to keep the stored results"
        )
    return code, (
        f"WARNING: {message}; stored results are kept (if they would differ, raise `version` in "
        "the experiment and use another --run-dir; --strict-code refuses)"
    )
