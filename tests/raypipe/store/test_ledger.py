from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.store import ledger as ledger_module
from raypipe.store.ledger import RESULTS, Ledger, LedgerView, checksum
from raypipe.store.run_directory import BASE, RunDirectory


def only_file(run: RunDirectory) -> Path:
    assert run.list(run.ledger) == ["00000000.jsonl"]
    return Path(run.ledger, "00000000.jsonl")


TEXT = st.text() | st.just("file \udcff")  # as names of files that are not UTF-8
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
TABLE, KEY = st.sampled_from(["units", "stüdies", "t/3"]), st.sampled_from(["a", "b/\n1", "é"])
ROWS = st.dictionaries(KEY, st.dictionaries(st.text(), JSON, max_size=3), max_size=3)
CHANGES = st.one_of(
    st.tuples(st.just("put"), st.dictionaries(TABLE, ROWS, max_size=2)),
    st.tuples(st.just("remove"), TABLE, st.lists(KEY, unique=True)),
    st.tuples(st.just("crash"), TABLE, KEY, st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("reopen")),
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.lists(CHANGES, max_size=12))
def test_the_newest_row_of_each_key_counts_after_any_changes_and_crashes(anywhere, changes):
    """Locally a crash leaves a part of a line; elsewhere it leaves segments that were merged."""
    anywhere.delete(anywhere.ledger)
    expected: dict[str, dict[str, Any]] = {}
    ledger = Ledger(anywhere)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "_MAX_SEGMENTS", 3)
        for kind, *given_ in changes:
            if kind == "put":
                ledger.put_tables(given_[0])
                for table, rows in given_[0].items():
                    expected.setdefault(table, {}).update(rows)
            elif kind == "remove":
                ledger.remove(*given_)
                for key in given_[1]:
                    expected.get(given_[0], {}).pop(key, None)
            elif kind == "crash":
                table, key, part = given_
                if crash(anywhere, ledger, table, key, part):
                    expected.setdefault(table, {})[key] = {"last": 1}
                ledger = Ledger(anywhere)
            else:
                ledger = Ledger(anywhere)
            expected = {table: rows for table, rows in expected.items() if rows}
            for reading in (ledger, Ledger(anywhere, writable=False)):
                found = {table: dict(reading.items(table)) for table in reading.tables()}
                assert {table: rows for table, rows in found.items() if rows} == expected
                for table, rows in expected.items():
                    assert [key for key, _ in reading.items(table)] == list(rows)
                    assert reading.rows(table) == list(rows.values())
            assert not ledger.damage
        ledger.put("units", {"last": {}})
        assert len(anywhere.list(anywhere.ledger)) <= 3


def crash(run: RunDirectory, ledger: Ledger, table: str, key: str, part: float) -> bool:
    """Put a row and die; return whether it is stored."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    if not run.is_local:
        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(RunDirectory, "delete", die)
            ledger.put(table, {key: {"last": 1}})
        return True
    ledger.put(table, {key: {"last": 1}})
    file = only_file(run)
    *earlier, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*earlier, last[: int(len(last) * part)]]))
    return False


@pytest.mark.parametrize("value", [object(), {1}, b"x", [Path("a")], {(1, 2): 3}])
def test_a_row_that_is_no_json_leaves_nothing_behind(anywhere, value):
    ledger = Ledger(anywhere)
    ledger.put("calls", {"a": {"x": 1}})
    with pytest.raises(TypeError):
        ledger.put("calls", {"b": {"x": 2}, "c": {"x": value}})
    for reading in (ledger, Ledger(anywhere)):
        assert list(reading.items("calls")) == [("a", {"x": 1})]


def test_a_reader_writes_nothing(run, caplog):
    with pytest.raises(RuntimeError, match="opened for reading"):
        Ledger(run, writable=False).put("units", {"a": {}})
    assert not run.exists(run.path())
    Ledger(run).put("units", {"a": {}})
    file = only_file(run)
    file.write_bytes(file.read_bytes() + b'{"torn')
    before = file.read_bytes()
    assert Ledger(run, writable=False).rows("units") == [{}]
    assert file.read_bytes() == before
    assert "cut off a half-written last line (6 bytes)" in caplog.text


@pytest.mark.parametrize("variant", [BASE, "rate=1"])
@pytest.mark.parametrize("damage", [b"\x00" * 20 + b"\n", b"", b"half"])
def test_a_damaged_line_costs_its_unit_and_keeps_no_older_result(anywhere, variant, damage):
    """Any line is damaged, or missing, or loses its end and with it the begin of the next."""
    view = LedgerView(Ledger(anywhere, stamp={"command_id": "first"}), variant)
    view.put("runs", {"run": {}})
    for rows in ({"a": {"x": 1}, "b": {"x": 2}}, {"b": {"x": 3}}, {"c": {"x": 4}}):
        units = {key: {RESULTS: {"calls": checksum(row)}} for key, row in rows.items()}
        view.put_tables({"calls": rows, "units": units})
    view.put("stages", {"calls": {}})
    newest = dict(view.items("calls"))
    own = {} if variant == BASE else {"variant": variant}
    stored = {n: anywhere.read(f"{anywhere.ledger}/{n}") for n in anywhere.list(anywhere.ledger)}
    for name, content in stored.items():
        lines = content.splitlines(keepends=True)
        for place, line in enumerate(lines):
            hit = lines[place : place + 1 + (damage == b"half")]
            concerned = {k.partition("@")[0] for each in hit for k in json.loads(each)["keys"]}
            broken = line[:20] if damage == b"half" else damage
            anywhere.delete(anywhere.ledger)
            damaged = {name: b"".join([*lines[:place], broken, *lines[place + 1 :]])}
            for file, text in {**stored, **damaged}.items():
                anywhere.write(f"{anywhere.ledger}/{file}", text)
            for writable in (False, True, False):
                ledger = Ledger(anywhere, writable=writable)
                assert ledger.damage.count("line ") <= len(hit)
                found = LedgerView(ledger, variant)
                kept = {key for key in "abc" if found.get("units", key)}
                assert {*"abc"} - concerned <= kept
                for key in kept:
                    row, unit = found.get("calls", key), found.get("units", key)
                    # of two lines that became one, the earlier result may be left
                    assert row == newest[key] or (
                        damage == b"half" and unit == {RESULTS: {"calls": checksum(row)}, **own}
                    )
            assert not ledger.damage
            kept_beside = [each for each in anywhere.list(anywhere.ledger) if ".damaged" in each]
            at_end = place == len(lines) - 1 and not damage.startswith(b"\x00")
            assert kept_beside == ([] if at_end else [f"{name}.damaged"])


def test_an_interrupt_at_any_line_of_an_append_damages_nothing(anywhere, caplog):
    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != ledger_module.__file__:
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return interrupt

    place, stored, before = 0, True, sys.gettrace()
    while stored:
        place += 1
        left = place
        anywhere.delete(anywhere.ledger)
        ledger = Ledger(anywhere)
        ledger.put("units", {"a": {"x": 1}})
        sys.settrace(interrupt)
        try:
            ledger.put("units", {"b": {"x": 2}})
            stored = False  # it has fewer lines than that
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        ledger.put("units", {"c": {"x": 3}})
        found = dict(Ledger(anywhere).items("units"))
        assert found.pop("b", {"x": 2}) == {"x": 2}
        assert found == {"a": {"x": 1}, "c": {"x": 3}}
    assert place > 30
    assert not caplog.records


def test_an_append_outlasts_a_loss_of_power(run, monkeypatch):
    """So does the name of a new ledger, as that of every file: test_run_directory.py."""
    synced: list[int] = []
    ledger = Ledger(run)
    ledger.put("units", {"a": {}})
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    ledger.put("units", {"b": {}})
    assert synced == [only_file(run).stat().st_ino]  # once is enough


def test_what_a_replaced_writer_has_under_way_replaces_nothing(remote, monkeypatch, caplog):
    earlier = Ledger(remote)
    earlier.put("units", {"a": {"x": 1}})
    under_way: list[tuple[str, bytes]] = []
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write", lambda run, *sent: under_way.append(sent))
        earlier.put("units", {"late": {"x": 2}, "b": {"x": 2}})
    ledger = Ledger(remote)
    ledger.put("units", {"b": {"x": 3}})
    for sent in under_way:
        remote.write(*sent)
    rows = {"a": {"x": 1}, "late": {"x": 2}}
    for number in range(40):  # merged meanwhile
        ledger.put("units", {str(number): {"x": number}})
        rows[str(number)] = {"x": number}
        found = dict(Ledger(remote, writable=False).items("units"))
        assert found.pop("b")["x"] in (2, 3)  # both finished it
        assert found == rows
    # the one that came late, one of merged rows, and nine
    assert len(remote.list(remote.ledger)) == 11
    assert not caplog.records


def test_an_append_of_which_nobody_knows_whether_it_arrived_loses_none(remote, monkeypatch):
    real = RunDirectory.write

    def write(run: RunDirectory, path: str, content: bytes) -> None:
        real(run, path, content)
        raise OSError(errno.ETIMEDOUT, "the answer was lost")

    ledger = Ledger(remote)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write", write)
        with pytest.raises(OSError, match="the answer was lost"):
            ledger.put("units", {"a": {}})
    assert ledger.rows("units") == []
    ledger.put("units", {"b": {}})
    assert [key for key, _ in Ledger(remote).items("units")] == ["a", "b"]


@pytest.mark.parametrize(("merges", "whole"), [(1, True), (5, True), (6, False)])
def test_a_reader_begins_again_where_segments_are_merged(remote, monkeypatch, merges, whole):
    monkeypatch.setattr(ledger_module, "_PAUSE_S", 0)
    writer = Ledger(remote)
    writer.put("units", {"a": {"x": 1}, "b": {"x": 2}})
    real, listed = RunDirectory.list, 0

    def list_slowly(run: RunDirectory, folder: str) -> list[str]:
        nonlocal listed
        names = real(run, folder)
        listed += 1
        if listed <= merges:
            with monkeypatch.context() as patch:
                patch.setattr(ledger_module, "_MAX_SEGMENTS", 1)
                writer.put("units", {"b": {"x": listed}})
        return names

    monkeypatch.setattr(RunDirectory, "list", list_slowly)
    if whole:
        found = Ledger(remote, writable=False)
        assert list(found.items("units")) == [("a", {"x": 1}), ("b", {"x": merges})]
    else:
        with pytest.raises(ConfigError, match="another raypipe command is writing it"):
            Ledger(remote, writable=False)


def test_what_cannot_be_read_is_one_message(anywhere):
    anywhere.fs.create_dir(f"{anywhere.ledger}/00000000.jsonl", recursive=True)
    for writable in (False, True):
        with pytest.raises(ConfigError, match="its ledger cannot be read"):
            Ledger(anywhere, writable=writable)


def test_a_run_directory_can_move_to_object_storage_and_back(remote, tmp_path):
    local = RunDirectory.at(tmp_path / "remote")  # the same folder
    assert remote.fs != local.fs
    for number, run in enumerate([local, remote, remote, local, local, remote]):
        Ledger(run).put("units", {"a": {"x": number}})
        assert Ledger(local).rows("units") == Ledger(remote).rows("units") == [{"x": number}]


def test_a_line_that_is_damaged_while_the_ledger_is_open_is_an_error(run):
    ledger = Ledger(run)
    for key, row in {"a": {"x": 1}, "b": {"x": 2}}.items():
        unit = {key: {RESULTS: {"calls": checksum(row)}}}
        ledger.put_tables({"calls": {key: row}, "units": unit})
    file = only_file(run)
    file.write_bytes(file.read_bytes().replace(b'"x":2', b'"x":7'))
    assert ledger.get("calls", "a") == {"x": 1}
    with pytest.raises(OSError, match="damaged while this command runs"):
        ledger.get("calls", "b")
    again = "1 of 2 units run again; the others are intact"
    assert Ledger.to_read(run).damage == f"line 3 of 00000000.jsonl; {again}"


def test_rows_that_are_put_together_share_lines_of_64_rows_or_a_few_mib(run):
    ledger = Ledger(run)
    ledger.put("calls", {str(number): {} for number in range(130)})
    ledger.put(
        "calls", {str(size): {"x": size * " "} for size in (5_000_000, 2_000_000, 2_000_001)}
    )
    lines = only_file(run).read_bytes().splitlines()
    assert [len(json.loads(line)["keys"]) for line in lines] == [64, 64, 2, 1, 2]


def test_a_row_that_is_written_again_keeps_the_command_that_computed_it(run):
    Ledger(run, stamp={"command_id": "first"}).put("trials", {"a": {"x": 1}})
    second = Ledger(run, stamp={"command_id": "second"})
    second.put("trials", {"a": {**(second.get("trials", "a") or {}), "y": 2}, "b": {"x": 2}})
    assert second.rows("trials") == [
        {"x": 1, "y": 2, "command_id": "first"},
        {"x": 2, "command_id": "second"},
    ]
