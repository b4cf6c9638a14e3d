"""Splits of a data set, and tasks that each work on a block of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from experiments.common.corpora.corpus import CorpusError
from raypipe import PoolOptions, StageContext

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
#: the splits of a task whose best step is chosen on a part of the training data
Part = Literal["train", "validation", "held_out"]
PARTS: tuple[Part, ...] = get_args(Part)

S = TypeVar("S", bound=str)
T = TypeVar("T")

_SHARES = 10_000
#: rows that a validation part must have: fewer hardly tell which step is the best one
_FEWEST_VALIDATION = 20


def text_hashes(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return a hash of each text, the same on every platform."""
    digests = b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return np.frombuffer(digests, "<u8")


def held_out(hashes: NDArray[np.uint64], share: float, source: str, key: str) -> NDArray[np.bool_]:
    """Return which rows are held out; equal rows are on the same side.

    Args:
        hashes: of the rows.
        share: approximate fraction of the rows.
        source: the origin for error messages.
        key: the setting that holds the share.

    Raises:
        CorpusError: all rows are on one side.

    """
    mask: NDArray[np.bool_] = hashes % np.uint64(_SHARES) < round(share * _SHARES)
    if mask.all() or not mask.any():
        raise CorpusError(
            f"{source}: of {len(mask)} rows {int(mask.sum())} are held out; give more "
            f"rows, another {key} or a separate file"
        )
    return mask


def validation(hashes: NDArray[np.uint64], share: float) -> tuple[NDArray[np.bool_], list[str]]:
    """Return which training rows choose the best step, and a remark if there are too few.

    Equal rows are on the same side. The choice does not depend on that of :func:`held_out`.

    Args:
        hashes: of the training rows.
        share: approximate fraction of the rows.

    """
    mask: NDArray[np.bool_] = hashes // np.uint64(_SHARES) % np.uint64(_SHARES) < round(
        share * _SHARES
    )
    if _FEWEST_VALIDATION <= mask.sum() < len(mask):
        return mask, []
    note = (
        f"no validation part: data.validation_share = {share:g} of {len(mask)} training rows is "
        f"{mask.sum()}, and {_FEWEST_VALIDATION} are needed; the model of the last step is measured"
    )
    return np.zeros_like(mask), [note]


def evenly_spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` items, at equal distances from the first to the last.

    A tokenizer that is trained on the beginning of a sorted file has a biased vocabulary.
    """
    return items[:: max(1, -(-len(items) // most))]


class Block(NamedTuple, Generic[S]):
    """Rows ``[start, end)`` of a split; its text is the key of its task."""

    stage: str
    split: S
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.split}/{self.start}"


def map_blocks(
    context: StageContext,
    rows: Mapping[S, int],
    size: int,
    call: Callable[[Block[S]], tuple[Any, ...]],
    *,
    on_gpus: bool = False,
) -> Iterator[tuple[Block[S], Any]]:
    """Run a task per block of rows; yield each block with its result, in the order of the rows.

    Args:
        context: of the stage, whose progress counts the rows.
        rows: number of rows of each split.
        size: rows per task.
        call: returns the function of a block's task, followed by its arguments.
        on_gpus: whether the tasks use GPUs if there are some. There is then one task per GPU and
            split, since each one loads its model, with a multiple of ``size`` rows.

    Raises:
        UnitError: a task failed for good; after all others have run.

    """
    gpus = [gpu.name for node in context.session.nodes for gpu in node.gpus] if on_gpus else []
    if gpus:
        context.device = gpus[0]
        size *= max(1, -(-max(rows.values()) // (size * len(gpus))))
    blocks = (
        Block(context.stage.name, split, start, min(start + size, total))
        for split, total in rows.items()
        for start in range(0, total, size)
    )
    context.begin(sum(rows.values()))
    done = 0
    with context.pool(PoolOptions(gpus=float(bool(gpus)))) as pool:
        for block, result in context.map(pool, ((block, *call(block)) for block in blocks)):
            yield block, result
            done += block.end - block.start
            context.advance(done)
