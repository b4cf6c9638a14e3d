"""Training task of the surrogate: the log density of unseen values (Mueller et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.pabbo_lda.surrogate.model import Mixture, SurrogateModel, SurrogateSettings
from experiments.pabbo_lda.surrogate_training.searches import (
    STREAM_SIZE,
    SearchStates,
    sample_searches,
)
from raypipe.config.settings import Operational, Settings
from raypipe.training import keyed_random
from raypipe.training.task import Loss, SampleIds, StepContext, TrainTask

#: share of the steps whose searches have few evaluations, and at most how many these are
_SHORT, _FEW = 0.25, 7
#: log density beyond which more does not count: a function without noise has no bound
_DENSEST = 30.0
#: functions of the evaluation, apart from those of any training
_HELD_OUT = 2**40
_HELD_OUT_SEED = 1_000_000
#: evaluations per function of the searches that are held out
_HELD_OUT_SIZES = (3, 8, 20, 35)


class PriorFittingSettings(Settings):
    """Training of the surrogate on synthetic functions."""

    model: SurrogateSettings = SurrogateSettings()
    """Size of the network."""
    evaluations: PositiveInt = Field(40, ge=8)
    """Largest number of evaluated points per function."""
    queries: PositiveInt = Field(32, ge=2)
    """Values to predict per function."""
    held_out: Operational[PositiveInt] = 256
    """Held-out functions per number of evaluated points."""


class PriorFittingTask(TrainTask):
    """Training of the surrogate; a sample is a function."""

    shuffle = False

    def __init__(self, settings: PriorFittingSettings) -> None:
        self.settings = settings

    def build_model(self) -> SurrogateModel:
        """Return the network of the settings."""
        return SurrogateModel(self.settings.model)

    def build_dataset(self) -> Dataset[int]:
        """Return the numbers of functions."""
        return SampleIds()

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the layers of the network."""
        assert isinstance(model, SurrogateModel)
        return model.layers

    def metadata(self) -> Mapping[str, str]:
        """Return the size of the network, which ``experiments.pabbo_lda.surrogate.model`` reads."""
        return {"surrogate": self.settings.model.model_dump_json()}

    def loss(self, model: SurrogateModel, batch: Tensor, context: StepContext) -> Loss:
        """Return the loss of the functions ``batch``, an int64 ``[B]``."""
        size = _size(context.seed, context.step, self.settings.evaluations)
        with torch.autocast(batch.device.type, enabled=False):
            searches = sample_searches(context.seed, batch, size, self.settings.queries)
        surprise = _surprise(model, searches).clamp(min=-_DENSEST).mean(1)
        return Loss(surprise.sum(), len(batch))

    def evaluate(
        self, model: SurrogateModel, device: torch.device, batch_size: int
    ) -> Mapping[str, float]:
        """Return the mean negative log density of the values of held-out functions."""
        del batch_size
        samples = _HELD_OUT + torch.arange(self.settings.held_out, device=device)
        with torch.autocast(device.type, enabled=False):
            surprises = [
                _surprise(model, sample_searches(_HELD_OUT_SEED, samples, size, 40)).mean()
                for size in _HELD_OUT_SIZES
            ]
        return {"surprise": torch.stack(surprises).mean().item()}


def _size(seed: int, step: int, largest: int) -> int:
    """Return the number of evaluated points of the functions of a step."""
    draws = keyed_random.uniform(seed, STREAM_SIZE, torch.tensor([step]), 2)[0]
    short, share = draws.tolist()
    return 1 + int(share * (_FEW if short < _SHORT else largest))


def _surprise(model: SurrogateModel, searches: SearchStates) -> Tensor:
    """Return the negative log density ``[B, m]`` of the targets."""
    s = searches
    posterior: Mixture = model(s.known, s.values, s.queries, s.used)
    return -posterior.log_density(s.targets)
