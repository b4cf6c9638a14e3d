"""A part in a separate process: ``python -m benchmarks.gpu_parts.child PART BENCH``.

Every row is written as soon as it is known, as a line of ``rows.jsonl`` in the part's folder.
"""

from __future__ import annotations

import json
import sys

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.parts import PARTS

ROWS = "rows.jsonl"


def main(name: str, text: str) -> None:
    """Run a part with the bench in JSON."""
    bench = Bench.load(text)
    part = next(each for each in PARTS if each.name == name)
    with (bench.folder / ROWS).open("w", encoding="utf-8") as file:
        for row in part.function(bench):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
