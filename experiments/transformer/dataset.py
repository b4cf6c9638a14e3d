"""Dataset of prepared samples, memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from experiments.transformer.data import SplitName
from experiments.transformer.prepare_stage import split_path
from raypipe.storage.artifacts import read_arrow
from raypipe.storage.run_directory import RunDirectory

Sample = tuple[Tensor, ...]


@dataclass(frozen=True)
class StoredSamples(Dataset[Sample]):
    """The rows of a split; cheap to pickle, opened on the first read.

    A sequence is ``(ids, target)``, a row of a table ``(numeric, categories, target)``.
    """

    run_dir: RunDirectory
    name: SplitName

    def __len__(self) -> int:
        return len(self._columns["target"])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        target = torch.tensor(self._columns["target"][index])
        if "tokens" in self._columns:
            return torch.tensor(self._tokens(index), dtype=torch.int64), target
        numeric = torch.tensor(self._columns["numeric"][index])
        return numeric, torch.tensor(self._columns["categories"][index]).long(), target

    def _tokens(self, index: int) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = self._columns["tokens"][index].values.to_numpy()
        return ids

    @cached_property
    def _columns(self) -> dict[str, Any]:
        table = read_arrow(self.run_dir, split_path(self.run_dir, self.name))
        # one chunk each; combine_chunks would copy it
        columns = {name: table.column(name).chunk(0) for name in table.column_names}
        columns["target"] = columns["target"].to_numpy()
        if "tokens" in columns:
            return columns
        rows = len(table)
        empty = {
            "numeric": np.empty((rows, 0), np.float32),
            "categories": np.empty((rows, 0), np.int32),
        }
        for name in empty:
            if name in columns:
                columns[name] = columns[name].values.to_numpy().reshape(rows, -1)
        return {**empty, **columns}

    def __getstate__(self) -> dict[str, object]:
        return {"run_dir": self.run_dir, "name": self.name}
