"""Splits of a data set, and tasks that each work on a block of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from raypipe.graph.context import StageContext
from raypipe.graph.launcher import PoolOptions

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
#: the splits of a task whose best step is chosen on a part of the training data
Part = Literal["train", "validation", "held_out"]
PARTS: tuple[Part, ...] = get_args(Part)

S = TypeVar("S", bound=str)


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
