"""What fuzzing has found: crashes, endless work, and results that were not the file's."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from tests.fuzz.readers import JSONL, LEDGER, PARQUET, UCI, WORDS, readers

READERS = readers()
WEIGHTS = READERS["weights"].seeds[0]
HEAD = b"experiment: example_experiment\n"
LAUGHS = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % before] * 9))
    for before, name in zip(b"abcdefghijklmno", b"bcdefghijklmnop", strict=True)
)
MERGES = (
    LAUGHS.replace(b"[x,x,x,x,x,x,x,x,x]", b"{k: 1}").replace(b"[", b"{<<: [").replace(b"]", b"]}")
)
NO_ARRAY = io.BytesIO()
with zipfile.ZipFile(NO_ARRAY, "w") as _zip:
    _zip.writestr("x.npy", b"some text")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("configuration", HEAD + LAUGHS, "more than 100000 values"),
        ("configuration", HEAD + MERGES, "more than 100000 values"),
        ("configuration", HEAD + b"a: &a {b: *a}", "a value holds itself"),
        ("configuration", HEAD + b"study: {runs: 0x" + b"f" * 5000 + b"}", "5002 characters"),
        ("configuration", HEAD + b"study: {runs: " + b"9" * 50 + b"}", "must not be beyond"),
        ("configuration", HEAD + b"a: " + b"[" * 50_000, "nested too deeply"),
        ("configuration", HEAD + b"a: " + b"[" * 70 + b"]" * 70, "nested too deeply"),
        ("configuration", HEAD + b"a: " + b"x" * 50_000, "xxx..."),
        ("configuration", HEAD + b"x" * 2**21, "over 1048576 characters"),
        ("configuration", HEAD + b"study: {options: {a: !!binary /w==}}", "could not determine"),
        ("configuration", b"".join(b"k%d: 1\n" % i for i in range(200)) + HEAD, "150 more"),
        ("configuration", HEAD + b"profiles: {gpu: {min_gpu_memory_gb: .nan}}", "a finite number"),
        ("configuration", b"experiment: idlelib.idle_test.__main__", "cannot be imported"),
        ("override", b"study.options." + b"a." * 400 + b"a=1", "nested too deeply"),
        ("override", b"a." * 20_000 + b"a=1", "nested too deeply"),
        ("override", b"\x80=1", "must have the form"),
        ("uci", UCI.replace(b"1 3 1", b"1 1 1"), "entry 2 is of document 1 and word 1"),
        ("uci", UCI.replace(b"3", b"99999999", 1), "declares 99999999 documents"),
        ("uci", UCI.replace(b"3", b"9" * 5000, 1), "number of documents"),
        ("vocabulary", WORDS.replace(b"beta", b""), "line 2 has no word"),
        ("hierarchy", b"\xef\xbb", "cannot be read as UTF-8 text"),
        ("labels", b"[" * 50_000 + b"\t\n", "[[[..."),
        ("gold", b"a\t1,\t0 3\n", "expected document id"),
        ("column.jsonl", b"null" + JSONL, "line 1: not JSON"),
        ("column.jsonl", b"null\n" + JSONL, "line 1: expected an object"),
        ("column.csv", b"\x80id,text\n1,2\n", "cannot be read"),
        ("rows.npz", NO_ARRAY.getvalue(), "cannot be read as arrays"),
        ("weights", WEIGHTS.replace(b"sha256", b"sha257"), "checksum is missing"),
    ],
)
def test_it_is_refused(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        READERS[name].check(content, tmp_path)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["column.parquet", "documents.parquet"])
def test_parquet_that_declares_other_rows_than_it_has(name: str, tmp_path: Path) -> None:
    before_row_groups = b"\x16\x06\x19\x1c"  # in the footer, after 3 as an i64: a list
    assert PARQUET.count(before_row_groups) == 1
    content = PARQUET.replace(before_row_groups, b"\x16\x08\x19\x1c")
    with pytest.raises(ConfigError, match="declares 4 rows and holds 3"):
        READERS[name].check(content, tmp_path)


def test_a_row_group_that_declares_fewer_rows_than_it_has(tmp_path: Path) -> None:
    content, rows = READERS["table"].seeds[0], b"\x16\x64\x26"  # in the footer: 50 as an i64
    assert content.count(rows) == 1
    with pytest.raises(ConfigError, match="declares 50 rows and holds 19"):
        READERS["table"].check(content.replace(rows, b"\x16\x26\x26"), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        LEDGER.replace(b"1.5", b"1.6"),
        b"".join(LEDGER.splitlines(keepends=True)[1:]),
        LEDGER.splitlines(keepends=True)[0] * 2 + LEDGER,
        b"\n",
        b"[" * 10**5 + b"\n" + LEDGER,
        b'{"table": 5, "key": "a", "row": {}}\n' + LEDGER,
    ],
)
def test_a_ledger_with_other_lines_has_no_finished_units(content: bytes, tmp_path: Path) -> None:
    READERS["ledger"].check(content, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02.", b"PK\x03\x04", b"{" * 10**5])
def test_a_checkpoint_that_its_manifest_vouches_for(content: bytes, tmp_path: Path) -> None:
    assert not READERS["forged/state.pt"].check(content, tmp_path)


@pytest.mark.parametrize(
    "content", [b"[" * 10**5, b"[]", b'{"step": "5", "sha256": ""}', b'{"step": 5, "sha256": ""}']
)
def test_a_manifest_of_another_form(content: bytes, tmp_path: Path) -> None:
    assert not READERS["checkpoint/manifest.json"].check(content, tmp_path)


def test_the_report_of_a_run_whose_configuration_is_damaged(tmp_path: Path) -> None:
    from raypipe.commands import report as inspection

    for name in ("ledger", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"config\.yaml: is damaged"):
        inspection.report(str(tmp_path))
