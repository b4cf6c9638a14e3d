"""``raypipe logs``: what units and tasks printed, and why they failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypipe.commands.summary import has_recovered, opened
from raypipe.commands.table_view import terminal_width, view
from raypipe.config.levels import did_you_mean
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
        unit = _full({**row, "unit": key.removesuffix(f"@{row.get('variant', BASE)}")})
        units[run.log(unit).rpartition("/")[2]] = unit
    rows = []
    for name in sorted({*sizes, *failures}):
        failed = failures.get(name, [])
        unit, status, kind = units.get(name, name.removesuffix(_SUFFIX)), "printed", ""
        if failed:
            last = failed[-1]
            unit, kind = _full(last), last["kind"]
            status = "failed" if last["outcome"] == "gave up" else last["outcome"]
            status = "recovered" if has_recovered(ledger, last) else status
        log = f"logs/{name}" if name in sizes else ""
        row = {"unit": unit, "status": status, "failures": len(failed), "kind": kind}
        rows.append({**row, "bytes": sizes.get(name, 0), "log": log})
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
    logs = run.list(run.logs)
    name = _chosen(run, unit, logs, failures)
    if name in logs:
        content = without_credentials(run.read(run.path("logs", name)).decode(errors="replace"))
    else:
        rows = (row for row in failures if row["log"] == name)
        content = "\n".join(f"{r['kind']}: {r.get('traceback') or r['message']}" for r in rows)
    return printable("\n".join(map(last_state, content.split("\n"))), keep="\n\t").rstrip()


def _chosen(run: RunDirectory, unit: str, logs: Sequence[str], failures: Sequence[Row]) -> str:
    """Return the name of the log that a user means. Raises ConfigError."""
    known = list(dict.fromkeys([*logs, *(row["log"] for row in failures)]))
    asked = unit.removeprefix("logs/").removesuffix(_SUFFIX)
    exact = run.log(asked).rpartition("/")[2]
    stage = asked.partition("/")[0]
    rest = exact.removeprefix(stage)
    for found in (
        [exact] if exact in known else [],
        list(dict.fromkeys(row["log"] for row in failures if row["unit"] == unit)),
        [name for name in known if name.endswith(f"-{exact}")],
        [name for name in known if name.startswith(f"{stage}@") and name.endswith(rest)],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(name.removesuffix(_SUFFIX) for name in found[:10])
            raise ConfigError(f"{unit}: names several logs: {names}")
    if not known:
        raise ConfigError(f"{run.shown}: {_NONE}")
    near = did_you_mean(asked.replace("/", "-"), [name.removesuffix(_SUFFIX) for name in known])
    raise ConfigError(
        f"{run.shown}: no log of {unit!r}; a unit that printed nothing and did not fail has none "
        f"(`raypipe logs {run.shown}` lists them){near}"
    )


def _full(row: Row) -> str:
    """Return the name of a unit in the whole run, as its log has it: it begins with its stage."""
    stage = variant_name(row["stage"], row.get("variant", BASE))
    first, slash, rest = row["unit"].partition("/")
    return f"{stage}{slash}{rest}" if first == row["stage"] else f"{stage}/{row['unit']}"
