"""Base class of the training tasks that learn from one data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from torch.utils.data import Dataset

from raypipe import TrainTask


class DatasetTask(TrainTask):
    """Training on samples, with other samples that choose the best step, if any.

    Both data sets are sent to the workers, so they hold the location of the samples only.
    """

    def __init__(self, settings: Any, data: Any, held_out: Any = None) -> None:
        self.settings = settings
        self.data = data
        self.held_out = held_out

    def metadata(self) -> Mapping[str, str]:
        """Return the settings of the model."""
        settings: BaseModel = self.settings
        return {"model": settings.model_dump_json()}

    def build_dataset(self) -> Dataset[Any]:
        """Return the training samples."""
        samples: Dataset[Any] = self.data
        return samples

    def build_eval_dataset(self) -> Dataset[Any] | None:
        """Return the samples that choose the best step, if any."""
        samples: Dataset[Any] | None = self.held_out
        return samples
