"""Counters of the stand-in CUDA library in this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping

#: fields of ``Counters`` in rig.h, in its order
NAMES = (
    "launches",
    "gemms",
    "syncs",
    "event_syncs",
    "h2d",
    "d2h",
    "d2d",
    "h2d_bytes",
    "d2h_bytes",
    "mallocs",
    "frees",
    "ooms",
    "collectives",
    "memsets",
    "gather_bytes",
    "scatter_bytes",
    "reduce_bytes",
    "send_bytes",
)


class _Counters(Mapping[str, int]):
    """The current values; ``dict(counters)`` keeps them."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["RIG_LIBRARY"])

    def __getitem__(self, name: str) -> int:
        if name not in NAMES:
            raise KeyError(name)
        values = (ctypes.c_long * len(NAMES)).in_dll(self._library, "rig_counters")
        return int(values[NAMES.index(name)])

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


counters = _Counters()
