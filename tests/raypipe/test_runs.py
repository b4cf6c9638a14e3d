"""Runs as a user finds, reads, compares and watches them; commands.yaml has more."""

from __future__ import annotations

import csv
import io
import json
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from raypipe.api import command_of, results
from raypipe.commands.compare import compare
from raypipe.commands.listing import runs
from raypipe.commands.summary import log_rows, log_text, watch
from raypipe.commands.table_view import cell, view
from raypipe.store import run_notes
from raypipe.store.ledger import Ledger
from raypipe.store.lock import is_held, writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_notes import RunNotes
from raypipe.store.run_status import RunStatus
from raypipe.store.tables import Column, Table, write_table
from tests.command import finish, raypipe, spawn
from tests.raypipe.composed import status_of, write_status
from tests.scenario import cases, play


@pytest.mark.parametrize("case", cases(__file__, "runs"), ids=lambda case: case["name"])
def test_commands_on_runs(folder, case):
    play(case["commands"], now=datetime.now(UTC).isoformat())


# results


@given(
    st.lists(
        st.tuples(st.text(max_size=40), st.none() | st.floats(), st.integers(-99, 99)),
        min_size=2,
        max_size=8,
    ),
    st.integers(80, 120),
)
@settings(max_examples=60)
def test_no_value_is_cut_and_no_line_is_wider_than_the_terminal(rows, width):
    names, reals, whole = zip(*rows, strict=True)
    table = pa.table({"name": pa.array(names, pa.string()), "real": reals, "whole": whole})
    lines = view(table, width, whole=True).split("\n")
    assert all(cell_len(line) <= width and line.isprintable() for line in lines)
    words = " ".join(lines).split()
    assert {word for name in names for word in cell(name).split()} <= set(words)
    assert {str(number) for number in whole} <= set(words)


def test_rows_are_chosen_sorted_and_written_whole(run):
    at = datetime(2026, 1, 2, tzinfo=UTC)
    columns = [("a", "integer"), ("b", "text"), ("x", "real"), ("at", "time"), ("uri", "text")]
    table = Table("t", "a row", tuple(Column(name, kind, "It.") for name, kind in columns))
    odd = {"b": 'a "quoted", one\n', "x": 0.1 + 0.2, "uri": "s3://key:secret@b/x"}
    rows = [
        {"a": 1, "at": at.isoformat(), **odd},
        {"a": 3, "b": "y", "x": float("nan")},
        {"a": None, "b": "z"},
        {"a": 2, "b": "y"},
    ]
    write_status(run, "running")
    write_table(run, table, rows, "r")

    text = results(run.location, "t", columns="b,a", sort="b,-a", as_json=True)
    assert [list(row.values()) for row in json.loads(text)][1:] == [["y", 3], ["y", 2], ["z", None]]
    as_json = json.loads(results(run.location, "t", as_json=True))
    assert as_json[0]["x"] == 0.1 + 0.2
    assert as_json[1]["x"] is None
    assert as_json[0]["at"] == at.isoformat()
    as_csv = results(run.location, "t", as_csv=True)
    read = list(csv.DictReader(io.StringIO(as_csv)))
    assert [row["b"] for row in read] == ['a "quoted", one\n', "y", "z", "y"]
    assert read[0]["x"] == repr(0.1 + 0.2)
    assert "secret" not in as_csv + str(as_json)
    write_table(run, table, [], "r")
    assert results(run.location, "t", as_json=True) == "[]"


def test_without_duckdb_sql_says_what_to_install(work, monkeypatch):
    for name in ("ledger", "results"):
        Path("out", name).mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    shown = raypipe("results", "out", "--sql", "select 1", expected=2)
    assert "pip install 'raypipe-runner[sql]'" in shown


def test_a_reader_that_closes_the_pipe_gets_no_traceback(tmp_path):
    run = RunDirectory.at(tmp_path / "out")
    write_status(run, "running")
    rows = [{"value": float(i)} for i in range(50_000)]
    write_table(run, Table("many", "a row", (Column("value", "real", "A value."),)), rows, "r")
    command = f"{sys.executable} -m raypipe results {tmp_path}/out many --csv | head -2"
    shown = finish(spawn(tmp_path, "bash", "-c", command, environment={}))
    assert shown == "run_id,variant,command_id,value\nr,base,,0.0\n"


# ls, show, compare


def test_the_command_of_a_run_is_the_one_that_was_given(run):
    assert command_of(run) == f"raypipe run {run.config} --run-dir {run.shown}"
    write_status(run, command="raypipe run toy.yaml a.b=2 --only fit")
    assert command_of(run) == "raypipe run toy.yaml a.b=2 --only fit"


def test_the_age_and_the_state_of_many_runs(tmp_path):
    for number in range(20):
        run = RunDirectory.at(tmp_path / f"runs/e{number % 3}/{number:02}")
        write_status(run, hours=number)
    found = runs(str(tmp_path / "runs"))
    assert [each.run.location[-2:] for each in found] == [f"{number:02}" for number in range(20)]
    held = RunDirectory.at(tmp_path / "runs/e0/00")
    write_status(held, "running")
    assert runs(held.location)[0].status == "interrupted"
    with writing(held, print):
        assert runs(held.location)[0].status == "running"


def test_a_look_at_a_lock_takes_it_from_no_one(run):
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_held(run)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(100):
            with writing(run, print):
                assert is_held(run)
    finally:
        over.set()
        thread.join()
    assert not is_held(run)


def test_groups_are_not_averaged(tmp_path: Path) -> None:
    table = Table("scores", "a score", (Column("score", "real", "It.", better="higher"),),
                  axes=("method",), groups=("corpus",))  # fmt: skip
    runs = [RunDirectory.at(tmp_path / name) for name in "ab"]
    for run in runs:
        rows = [{"method": "m", "corpus": corpus, "seed": seed, "score": score}
                for corpus, score in (("x", 1.0), ("y", 9.0)) for seed in range(2)]  # fmt: skip
        write_table(run, table, rows, "r")
    found = {each["row"]: each["values"] for each in compare(runs)["results"]}
    assert found == {"x": [1.0, 1.0], "y": [9.0, 9.0]}


def test_a_table_of_calls_of_an_experiment_may_have_a_column_of_files(tmp_path: Path) -> None:
    run = RunDirectory.at(tmp_path / "out")
    write_status(run, "running")
    columns = Column("call", "text", "Its name."), Column("files", "integer", "How many.")
    write_table(run, Table("calls", "a call", columns), [{"call": "a", "files": 3}], "r")
    assert "\nfiles " not in raypipe("show", run.location)


# watch


def test_a_run_is_followed_until_it_ends(run, capsys, monkeypatch):
    monkeypatch.setattr("raypipe.commands.summary._PERIOD_S", 0.01)
    row = {"stage": "train", "done": 30, "total": 200, "seconds": 2.0, "note": "loss 0.5"}
    first = status_of("running", stages=3, done=1, running=(row,), messages=((1, "hello"),))
    last = replace(
        first,
        status="succeeded",
        done=3,
        running=(),
        messages=((3, "train: succeeded"),),
        result="accuracy 0.93 (model)",
    )
    with writing(run, print):
        run.write(run.status, first.to_bytes())
        timer = threading.Timer(0.3, run.write, (run.status, last.to_bytes()))
        timer.start()
        assert watch(run) == 0
        timer.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert lines[1].startswith("1 of 3 stages done, 0:0")
    assert lines[1].endswith("train 30/200 loss 0.5")
    assert lines[2] == "train: succeeded"
    assert "accuracy 0.93 (model)" in lines[-1]


def test_a_running_command_reports_its_progress(work, monkeypatch):
    """What a command writes while it runs is what a watcher sees; the report comes last."""
    seen: list[RunStatus] = []

    def look(run_dir: RunDirectory, *more: object) -> None:
        (found,) = runs(run_dir.location)
        assert found.details is not None
        seen.append(found.details)

    monkeypatch.setattr("raypipe.store.tables.conform", look)
    monkeypatch.setattr("raypipe.report.page.build", look)
    monkeypatch.setattr("raypipe.store.run_status._PERIOD_S", 0.01)
    raypipe("run", "toy.yaml", "--run-dir", "out")
    assert [found.status for found in seen] == ["running", "succeeded"]
    assert (seen[0].stages, seen[0].profile) == (2, "cpu")
    ended = RunStatus.parse(Path("out/status.json").read_bytes())
    assert ended is not None
    assert (ended.status, ended.done, ended.commands, ended.running) == ("succeeded", 2, 1, ())
    assert (ended.earlier_s, ended.jobs, ended.period_s) == (0.0, 0, 0.01)
    assert ended == seen[1]
    assert ended.messages[-1][1].startswith("done: ")
    raypipe("run", "toy.yaml", "squares.numbers=[1,2,3,8]", "--run-dir", "out", expected=130)
    again = RunStatus.parse(Path("out/status.json").read_bytes())
    assert again is not None
    assert (again.status, again.commands) == ("interrupted", 2)
    assert again.first_started_at == ended.first_started_at
    assert again.duration_s > again.earlier_s == ended.duration_s


def test_a_status_that_cannot_be_written_ends_no_run(work, caplog, monkeypatch):
    write_file = RunDirectory.write

    def full(self: RunDirectory, path: str, content: bytes, **more: bool) -> None:
        if path.endswith("status.json"):
            raise OSError(28, "No space left on device")
        write_file(self, path, content, **more)

    monkeypatch.setattr(RunDirectory, "write", full)
    raypipe("run", "toy.yaml", "--run-dir", "out")
    assert "the status was not written" in caplog.text
    assert runs("out")[0].status == "unknown"


@given(
    st.dictionaries(
        st.sampled_from(sorted(vars(status_of("running")))),
        st.none() | st.text() | st.integers() | st.lists(st.integers()) | st.booleans(),
    )
)
def test_any_values_are_a_status_or_none(values):
    content = json.dumps({**json.loads(status_of("running").to_bytes()), **values}).encode()
    found = RunStatus.parse(content)
    assert found is None or isinstance(found.duration_s, float)


# damage, control characters, version


def test_a_log_does_not_act_on_the_terminal(tmp_path):
    run = RunDirectory.at(str(tmp_path / "r"))
    unit, text = "fit\x1b[2J/0", "a\x1b]0;window\x07\tb\n 1%\r 9%\r\nat \x1b[31mx.py\x07"
    row = {"unit": unit, "stage": "fit\x1b[2J", "log": "0.log", "kind": "error", "outcome": ""}
    Ledger(run).put("failures", {"0": {**row, "traceback": text}})
    shown = raypipe("logs", str(tmp_path / "r"))
    assert "fit/0" in shown
    assert "\x1b" not in shown
    for written in (False, True):
        assert raypipe("logs", str(tmp_path / "r"), "0").endswith("a\tb\n 9%\nat x.py\n")
        if not written:
            run.append(run.log("0"), text.encode())


def test_logs_before_the_first_table(run: RunDirectory, remote: RunDirectory, monkeypatch):
    for place in (run, remote):
        monkeypatch.setattr(RunDirectory, "at", classmethod(lambda cls, location, it=place: it))
        place.append(place.log("lda/1"), b"# lda/1\nhello\n")
        place.write(f"{place.ledger}/none", b"")
        place.delete(f"{place.ledger}/none")
        monkeypatch.setattr(RunDirectory, "check", lambda self: None)
        assert log_text("it", "lda/1") == "# lda/1\nhello"
        assert [row["status"] for row in log_rows("it")] == ["printed"]


# notes and tags


def test_tags_and_the_note_change_while_a_run_goes_on(work, monkeypatch):
    def look(run_dir: RunDirectory, *more: object) -> None:
        run_notes.change(run_dir, "seen", ["late"])

    monkeypatch.setattr("raypipe.store.tables.conform", look)
    raypipe("run", "toy.yaml", "--run-dir", "out", "--tag", "early", "--note", "begun")
    (listed,) = runs(".")
    assert listed.notes == RunNotes("seen", ("early", "late"))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"tags": 1}', '{"tags": ["a b"]}', '{"note": null}', "\x80", "[" * 9999],
)
def test_a_damaged_file_of_notes_is_none(anywhere: RunDirectory, content):
    assert run_notes.read(anywhere) == RunNotes()
    anywhere.write(anywhere.notes, content.encode("latin-1"))
    assert run_notes.read(anywhere) == RunNotes()
    run_notes.change(anywhere, None, ["one"])
    assert run_notes.read(anywhere) == RunNotes("", ("one",))


def test_a_job_gets_the_note_and_the_tags(work, monkeypatch):
    sent: list[list[str]] = []

    def submit(address: str, words: list[str], *more: object, **options: object) -> int:
        sent.append(words)
        return 0

    monkeypatch.setitem(sys.modules, "raypipe.launch.submit", SimpleNamespace(submit=submit))
    given = ("--run-dir", "s3://b/x", "--tag", "a", "--tag", "b", "--note", "two  s3://k:s@c words")
    raypipe("submit", "toy.yaml", "--address", "http://head:8265", *given)
    assert sent[0][-6:] == ["--note", "two s3://***@c words", "--tag", "a", "--tag", "b"]
