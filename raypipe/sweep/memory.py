"""Memory models of a sweep's trial groups, stored for later runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from raypipe import faults
from raypipe.sweep import memory_store
from raypipe.sweep.memory_model import MemoryFit, MemoryModel, Verdict
from raypipe.sweep.trials import Trial


class Memory:
    """One memory model per group of trials on a device.

    ``capacity_bytes`` is the memory of the smallest GPU. It is None on a CPU, where every trial is
    assumed to fit and nothing is stored for later runs. ``priors`` are predicted lines by group.
    """

    def __init__(
        self,
        device: str,
        capacity_bytes: int | None,
        priors: Mapping[str, MemoryFit] = MappingProxyType({}),
    ) -> None:
        self.device, self.capacity_bytes, self._priors = device, capacity_bytes, priors
        self._models: dict[str, MemoryModel] = {}

    def model(self, group: str) -> MemoryModel:
        """Return the model of a group; a new one starts from the measurements of earlier runs."""
        if group not in self._models:
            preset = memory_store.load(self.device, group)
            prior = self._priors.get(group)
            self._models[group] = MemoryModel(self.capacity_bytes, preset=preset, prior=prior)
        return self._models[group]

    def verdict(self, trial: Trial) -> Verdict:
        """Predict whether a trial fits."""
        return self.model(trial.group).verdict(trial.micro_batch)

    def observe(self, trial: Trial, peak_bytes: int | None) -> None:
        """Record the peak memory of a succeeded trial; it may be unknown."""
        if peak_bytes:
            self.model(trial.group).observe(trial.micro_batch, peak_bytes)

    def ran_out(self, trial: Trial) -> None:
        """Record that a trial ran out of memory."""
        for group in {trial.group, trial.larger_group}:
            self.model(group).ran_out(trial.micro_batch)

    def keep(self, trials: Iterable[Trial], experiment: str, stage: str) -> None:
        """Store the measurements of these trials for later runs."""
        if self.device == "cpu" or faults.from_environment().oom_above is not None:
            return  # the limit is unknown, or the failures were injected
        for group, trial in {trial.group: trial for trial in trials}.items():
            measured = self.model(group).measured
            if not (measured.peaks or measured.failed):
                continue
            training = trial.training.settings.training
            about = {
                "experiment": experiment,
                "stage": stage,
                "precision": training.precision,
                "gradient_checkpointing": training.gradient_checkpointing,
                "compile": training.compile,
                "strategy": trial.training.settings.scaling.strategy,
            }
            memory_store.save(self.device, group, measured, about)
