"""The readers under atheris, which looks for inputs that reach new code.

``pip install atheris`` (Linux), then ``python -m tests.fuzz.coverage_guided READER SECONDS``.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["raypipe", "experiments", "yaml", "json", "tests.fuzz"]):
    from raypipe.errors import ConfigError
    from tests.fuzz.readers import readers


def main(name: str, seconds: str) -> None:
    """Read what atheris makes of the valid files, until the time is over or a reader fails."""
    reader = readers()[name]
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as place:
        corpus = Path(place, "corpus")
        corpus.mkdir()
        for number, seed in enumerate(reader.seeds):
            (corpus / str(number)).write_bytes(seed)

        def check(content: bytes) -> None:
            with contextlib.suppress(ConfigError):
                reader.check(content, Path(place))

        # an input that takes ten seconds, or two gigabytes, is a defect
        limits = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=4096"]
        arguments = [sys.argv[0], f"-max_total_time={seconds}", *limits, str(corpus)]
        atheris.Setup(arguments, check)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
