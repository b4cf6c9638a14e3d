"""Counters of the stand-in CUDA library in this process."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_FIELDS = re.compile(r"typedef struct \{\s*long ([^;]+);\s*\} Counters;")


def counters() -> dict[str, int]:
    """Return the current values by the names in rig.h."""
    declared = _FIELDS.search(Path(__file__).with_name("rig.h").read_text())
    assert declared is not None
    names = re.split(r",\s*", declared[1])
    library = ctypes.CDLL(os.environ["RIG_LIBRARY"])
    return dict(
        zip(names, (ctypes.c_long * len(names)).in_dll(library, "rig_counters"), strict=True)
    )
