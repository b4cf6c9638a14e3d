"""Whatever is in a file: the whole of it is read, or one error says what is wrong with which."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from raypipe.errors import ConfigError
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import Own, Reader, readers

READERS = readers()
#: of a reader; `make fuzz` has many more, drawn anew each time
EXAMPLES = int(os.environ.get("RAYPIPE_FUZZ_EXAMPLES", "40"))


@pytest.mark.parametrize("name", READERS)
def test_a_good_file_is_read(name: str, tmp_path: Path) -> None:
    for seed in READERS[name].seeds:
        assert READERS[name].check(seed, tmp_path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_read_whole_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name], tmp_path, EXAMPLES)


def fuzz(reader: Reader | Own, folder: Path, examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=examples <= 100,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated(reader.seeds))
    def check(content: bytes) -> None:
        with suppress(ConfigError):
            reader.check(content, folder)

    check()
