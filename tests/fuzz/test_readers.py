"""Whatever is in a file: the whole of it is read, or one error says what is wrong with which.

Then what fuzzing has found: crashes, endless work, and results that were not the file's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from raypipe.errors import ConfigError
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import LEDGER, readers

READERS = readers()
#: of a reader; `make fuzz` has many more, drawn anew each time
EXAMPLES = int(os.environ.get("RAYPIPE_FUZZ_EXAMPLES", "40"))
ANY = list(HealthCheck)
LIMITS = settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=ANY)


@pytest.mark.parametrize("name", READERS)
def test_a_good_file_is_read(name: str, tmp_path: Path) -> None:
    for seed in READERS[name].seeds:
        assert READERS[name].check(seed, tmp_path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_read_whole_or_refused(name: str, tmp_path: Path) -> None:
    @settings(LIMITS, derandomize=EXAMPLES <= 100)
    @given(mutated(READERS[name].seeds))
    def check(content: bytes) -> None:
        with suppress(ConfigError):
            READERS[name].check(content, tmp_path)

    check()


WEIGHTS = READERS["weights"].seeds[0]
HEAD = b"experiment: example_experiment\n"
LAUGHS = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % before] * 9))
    for before, name in zip(b"abcdefghijklmno", b"bcdefghijklmnop", strict=True)
)
MERGES = (
    LAUGHS.replace(b"[x,x,x,x,x,x,x,x,x]", b"{k: 1}").replace(b"[", b"{<<: [").replace(b"]", b"]}")
)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("configuration", HEAD + LAUGHS, "more than 100000 values"),
        ("configuration", HEAD + MERGES, "more than 100000 values"),
        ("configuration", HEAD + b"a: &a {b: *a}", "nested too deeply, or in itself"),
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
        ("labels", b"[" * 50_000 + b"\t\n", "[[[..."),
        ("weights", WEIGHTS.replace(b"sha256", b"sha257"), "checksum is missing"),
    ],
)
def test_it_is_refused(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        READERS[name].check(content, tmp_path)
    assert told in str(caught.value)


# in the footers: 3 or 50 as an i64
@pytest.mark.parametrize(
    ("name", "before", "after", "declared"),
    [
        ("column.parquet", b"\x06\x19\x1c", b"\x08\x19\x1c", "4 rows and holds 3"),
        ("documents.parquet", b"\x06\x19\x1c", b"\x08\x19\x1c", "4 rows and holds 3"),
        ("table", b"\x64\x26", b"\x26\x26", "50 rows and holds 19"),
    ],
)
def test_parquet_that_declares_other_rows_than_it_has(name, before, after, declared, tmp_path):
    (content,) = READERS[name].seeds
    old, new = (b"\x16" + number for number in (before, after))
    assert content.count(old) == 1
    with pytest.raises(ConfigError, match=f"declares {declared}"):
        READERS[name].check(content.replace(old, new), tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        # a ledger with other lines has no finished units; further lines before it change nothing
        ("ledger", LEDGER.replace(b"1.5", b"1.6")),
        ("ledger", b"".join(LEDGER.splitlines(keepends=True)[1:])),
        ("ledger", b"\n"),
        ("ledger", LEDGER.splitlines(keepends=True)[0] * 2 + LEDGER),
        ("ledger", b"[" * 10**5 + b"\n" + LEDGER),
        ("ledger", b'{"table": 5, "keys": ["a"], "rows": [{}]}\n' + LEDGER),
        # a checkpoint that its manifest vouches for, and a manifest of another form
        *(("forged/state.pt", each) for each in (b"", b"\x80\x02.", b"PK\x03\x04", b"{" * 10**5)),
        ("checkpoint/manifest.json", b"[" * 10**5),
        ("checkpoint/manifest.json", b"[]"),
        ("checkpoint/manifest.json", b'{"step": "5", "sha256": ""}'),
        ("checkpoint/manifest.json", b'{"step": 5, "sha256": ""}'),
    ],
)
def test_a_result_comes_of_a_whole_ledger_alone(name: str, content: bytes, tmp_path: Path) -> None:
    assert READERS[name].check(content, tmp_path) == content.endswith(LEDGER)
