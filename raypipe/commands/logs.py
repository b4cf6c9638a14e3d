"""``raypipe logs``: what units and tasks printed, and why they failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypipe.commands.results import opened
from raypipe.commands.table_view import terminal_width, view
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.redaction import last_state, printable, without_credentials
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE, RunDirectory, variant_name

_SUFFIX = ".log"
#: what is said of a run without logs
_NONE = (
    "has no logs: no unit printed anything or failed. What a unit prints goes to logs/ in the run "
    "directory; with --local, to the terminal"
)


def listing(run_dir: str) -> list[dict[str, Any]]:
    """Return a row per log, and per failed unit without one; also while the run goes on."""
    run = opened(run_dir)
    ledger = Ledger.to_read(run)
    failures: dict[str, list[Row]] = {}
    for row in ledger.rows("failures"):
        failures.setdefault(row["log"], []).append(row)
    sizes, units = run.sizes(run.logs), {}
    for key, row in ledger.items("units"):
        variant = row.get("variant", BASE)
        unit = _full(key.removesuffix(f"@{variant}"), row["stage"], variant)
        units[run.log(unit).rpartition("/")[2]] = unit
    rows = []
    for name in sorted({*sizes, *failures}):
        failed = failures.get(name, [])
        unit, status = units.get(name, name.removesuffix(_SUFFIX)), "printed"
        if failed:
            last = failed[-1]
            unit = _full(last["unit"], last["stage"], last.get("variant", BASE))
            status = "failed" if last["outcome"] == "gave up" else last["outcome"]
            if has_recovered(ledger, last):
                status = "recovered"
        row = {
            "unit": unit,
            "status": status,
            "failures": len(failed),
            "kind": failed[-1]["kind"] if failed else "",
            "bytes": sizes.get(name, 0),
            "log": f"logs/{name}" if name in sizes else "",
        }
        rows.append(row)
    return rows


def listing_text(run_dir: str) -> str:
    """Return the list of logs as a table."""
    rows = listing(run_dir)
    return view(rows, terminal_width(), whole=True) if rows else f"{run_dir}: {_NONE}"


def text(run_dir: str, unit: str) -> str:
    """Return the log of a unit, task or trial by its name, the end of it, or its log's name.

    Without the variant, a name is that of a unit of any variant. The text has no control
    sequences, and a line that was written over, such as that of a progress bar, is its last state.

    Raises:
        ConfigError: there is no such log, or more than one.

    """
    run = opened(run_dir)
    failures = Ledger.to_read(run).rows("failures")
    logs = [name.removesuffix(_SUFFIX) for name in run.list(run.logs)]
    name = _chosen(run, unit, logs, failures)
    if name in logs:
        path = run.path("logs", f"{name}{_SUFFIX}")
        content = without_credentials(run.read(path).decode(errors="replace"))
    else:
        rows = [row for row in failures if row["log"] == f"{name}{_SUFFIX}"]
        texts = (f"{row['kind']}: {row.get('traceback') or row['message']}" for row in rows)
        content = "\n".join(texts)
    return printable("\n".join(map(last_state, content.split("\n"))), keep="\n\t").rstrip()


def has_recovered(ledger: Ledger, failure: Row) -> bool:
    """Whether the unit of a failed attempt succeeded later; of another task, whether its stage."""
    unit, stage = failure["unit"], failure["stage"]
    variant = failure.get("variant", BASE)
    row = ledger.get("units", variant_name(unit, variant))
    if row is None and not unit.startswith(f"{stage}/"):
        row = ledger.get("stages", variant_name(stage, variant))
    return row is not None and row["status"] == "succeeded"


def _chosen(run: RunDirectory, unit: str, logs: Sequence[str], failures: Sequence[Row]) -> str:
    """Return the name of the log that a user means, without its suffix."""
    known = [*logs, *(row["log"].removesuffix(_SUFFIX) for row in failures)]
    known = list(dict.fromkeys(known))
    asked = unit.removeprefix("logs/").removesuffix(_SUFFIX)
    exact = run.log(asked).rpartition("/")[2].removesuffix(_SUFFIX)
    named = [row["log"].removesuffix(_SUFFIX) for row in failures if row["unit"] == unit]
    ends = [name for name in known if name.endswith(f"-{exact}")]
    stage = asked.partition("/")[0]
    rest = exact.removeprefix(stage)
    variants = [name for name in known if name.startswith(f"{stage}@") and name.endswith(rest)]
    exactly = [exact] if exact in known else []
    for found in (exactly, list(dict.fromkeys(named)), ends, variants):
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(f"{unit}: names several logs: {', '.join(found[:10])}")
    if not known:
        raise ConfigError(f"{run.shown}: {_NONE}")
    raise ConfigError(
        f"{run.shown}: no log of {unit!r}; a unit that printed nothing and did not fail has none "
        f"(`raypipe logs {run.shown}` lists them){did_you_mean(exact, known)}"
    )


def _full(unit: str, stage: str, variant: str) -> str:
    """Return the name of a unit in the whole run, as its log has it: it begins with its stage."""
    first, slash, rest = unit.partition("/")
    if first == stage:
        return f"{variant_name(first, variant)}{slash}{rest}"
    return f"{variant_name(stage, variant)}/{unit}"
