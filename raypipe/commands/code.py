"""Comparison of an experiment's source code with the code that computed the stored results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.errors import ConfigError
from raypipe.functions.experiment import FunctionSettings
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage
from raypipe.pipeline.source import Source
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
    source = configuration.source()
    code = Code(source, source.fingerprint)
    changed, refused = set[str](), set[str]()
    for stage in stages:
        for earlier in _stored_code(stage, ledger) - {code.fingerprint, ""}:
            modules = (ledger.get("code", earlier) or {}).get("modules", {})
            names = set(source.changes(modules))
            changed |= names
            if stage.strict_code:
                refused |= names
    if not changed:
        return code, ""
    names_text = ", ".join(sorted(changed)[:_MOST_NAMED])
    if len(changed) > _MOST_NAMED:
        names_text += f" and {len(changed) - _MOST_NAMED} more"
    message = f"the code changed since results were stored: {names_text}"
    if strict:
        raise ConfigError(
            f"--strict-code: {message}; raise `version` in the experiment and use another "
            "--run-dir, or leave --strict-code out to keep the stored results"
        )
    if refused:
        raise ConfigError(
            f"{configuration.origin}: {message}; use another --run-dir to compute everything "
            "with this code, or add version=1 to keep what is stored and compute the rest"
        )
    kept = any(
        isinstance(stage.settings, FunctionSettings) and stage.settings.version is not None
        for stage in stages
    )
    way = "raise `version` in the experiment and use another --run-dir; --strict-code refuses"
    if kept:
        way = "use another --run-dir"
    return code, f"WARNING: {message}; stored results are kept (if they would differ, {way})"


def after_edit(stages: Sequence[Stage]) -> str:
    """Return the hint to add ``version=1`` after an edit, if it would be refused; else empty."""
    if not any(stage.strict_code for stage in stages):
        return ""
    return "\nonce the code is edited, add version=1 to keep the results that are stored"


def _stored_code(stage: Stage, ledger: Ledger) -> set[str]:
    """Return the fingerprints of the code that computed a stage's stored units."""
    if stage.always_rerun:
        return set()
    seen = stage.seen(ledger)
    rows = (seen.get("units", unit.key) for unit in stage.units)
    return {str(row.get("code") or "") for row in rows if row is not None}
