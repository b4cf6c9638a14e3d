"""Settings of a sweep: the axes, the search, the scheduler and the metric."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from raypipe.config.axes import AxesSettings
from raypipe.config.settings import Settings

#: the section of the settings, and the stage that measures its points
SWEEP = "sweep"
#: searchers of Ray Tune, apart from BOHB, whose scheduler pauses trials
Searcher = Literal["random", "optuna", "hyperopt", "ax", "bayesopt", "hebo", "nevergrad", "zoopt"]


#: options of each scheduler
_OPTIONS: Mapping[str, Collection[str]] = {
    "asha": ("grace_period", "reduction_factor"),
    "median": ("grace_period",),
    "hyperband": ("reduction_factor",),
    "pbt": ("perturbation_interval", "quantile_fraction", "resample_probability", "synch"),
}


class SchedulerSettings(Settings):
    """A scheduler of Ray Tune, with its own options; those left out have Tune's defaults."""

    name: Literal["asha", "median", "hyperband", "pbt"]
    """Scheduler. asha, median and hyperband stop bad trials; pbt has bad trials go on from the
    weights of good ones with other settings.
    """
    grace_period: PositiveInt | None = None
    """Steps before asha or median may stop a trial; by default a tenth of them."""
    reduction_factor: float | None = Field(None, gt=1)
    """asha and hyperband continue one of this number of trials."""
    perturbation_interval: PositiveInt | None = None
    """Steps after which pbt compares the trials; by default a tenth of them."""
    quantile_fraction: float | None = Field(None, ge=0, le=0.5)
    """Share of the trials of pbt that go on from the weights of as many good ones."""
    resample_probability: float | None = Field(None, ge=0, le=1)
    """Probability that pbt draws a new value of a setting, instead of changing it a little."""
    synch: bool | None = None
    """Whether pbt compares trials at the same step only, and waits for the slowest."""

    @property
    def options(self) -> dict[str, Any]:
        """The given options."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    @model_validator(mode="after")
    def _own_options(self) -> SchedulerSettings:
        for key in self.options:
            if key not in _OPTIONS[self.name]:
                allowed = ", ".join(_OPTIONS[self.name])
                raise ValueError(f"{key}: is not an option of {self.name} (options: {allowed})")
        return self


class ConstraintSettings(Settings):
    """Conditions on every point of a sweep."""

    effective_batch: PositiveInt | None = None
    """Samples per optimizer step; the accumulation follows from the micro-batch, and points that
    cannot have it are left out.
    """


class SweepSettings(AxesSettings):
    """The stage, the points and the metric of a sweep; axes may be keys of the stage."""

    stage: str
    """Training stage whose settings are varied."""
    kind: Literal["systems", "quality"] = "systems"
    """Measure speed, memory and energy of a few steps (systems), or train each point to the end
    (quality).
    """
    constraints: ConstraintSettings = ConstraintSettings()
    """Conditions that every point meets."""
    metric: str | None = None
    """Column of `trials` to compare; by default samples_per_s, or for kind=quality the metric of
    `training.monitor`, else the first held-out one, else loss_final.
    """
    mode: Literal["min", "max"] | None = None
    """Whether the metric is minimized or maximized; by default what is declared, the mode of the
    monitor, or what its name tells.
    """
    further_metrics: dict[str, Literal["min", "max"]] = Field(default_factory=dict)
    """Other columns of `trials` that `search: optuna` optimizes, too, each with its mode."""
    search: Searcher = "random"
    """Searcher of Ray Tune. `random` runs every combination of the lists, with `samples` draws of
    the ranges; all others propose `samples` points, each from the results so far.
    """
    samples: PositiveInt = 16
    """Number of draws or proposals."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the draws or proposals."""
    scheduler: SchedulerSettings | None = None
    """Scheduler of Ray Tune, for kind=quality: its name, or a section
    with its options.
    """
    steps: PositiveInt = 10
    """Measured steps of a trial of kind=systems."""
    warmup_steps: PositiveInt = 5
    """Steps before the measured ones, which are not counted."""
    repeats: PositiveInt = 3
    """Measurements of each point of kind=systems: all points once, then all again."""
    concurrent: PositiveInt | None = None
    """Most trials at the same time; by default as many as fit."""

    @property
    def metric_name(self) -> str:
        """The column that a sweep optimizes; empty if its first trial decides."""
        return self.metric or ("samples_per_s" if self.is_systems else "")

    @property
    def is_systems(self) -> bool:
        """Whether it measures a few steps of each point."""
        return self.kind == "systems"

    @property
    def measurements(self) -> int:
        """How often each point is measured: more than once only if its metric then differs."""
        from raypipe.report.results import REPEATED  # with pandas, which is slow to import

        differs = self.is_systems and self.metric_name in REPEATED
        return self.repeats if differs else 1

    @property
    def scheduler_name(self) -> str:
        """The name of the scheduler; empty without one."""
        return self.scheduler.name if self.scheduler else ""

    @property
    def is_population(self) -> bool:
        """Whether settings change while a trial runs."""
        return self.scheduler_name == "pbt"

    @property
    def pauses(self) -> bool:
        """Whether its scheduler pauses trials, and continues them from checkpoints."""
        return self.scheduler_name in ("pbt", "hyperband")

    @property
    def is_searched(self) -> bool:
        """Whether later trials depend on the outcomes of earlier ones."""
        return self.search != "random"

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return the section with the scheduler as a section, and ``axes`` as in any."""
        if isinstance(given, Mapping) and isinstance(name := given.get("scheduler"), str):
            given = {**given, "scheduler": {"name": name}}
        return super().spelled_out(given)

    @model_validator(mode="after")
    def _consistent(self) -> SweepSettings:
        if self.mode is not None and self.metric is None:
            raise ValueError(f"mode = {self.mode}: of which metric? give metric, too")
        if self.further_metrics and self.search != "optuna":
            raise ValueError("further_metrics: are for search = optuna")
        name = self.scheduler_name
        if self.pauses and self.is_searched:
            raise ValueError(
                f"scheduler = {name}: needs all trials at its start; take search = random"
            )
        if self.pauses and self.concurrent is not None:
            raise ValueError(
                f"concurrent = {self.concurrent}: {name} starts all trials, and Tune runs as many "
                "at the same time as fit; leave it out"
            )
        if self.is_systems and name:
            raise ValueError(f"scheduler = {name}: is for kind = quality")
        if self.is_systems and self.metric_name.startswith("eval_"):
            raise ValueError(
                f"metric = {self.metric}: a trial of kind = systems is not evaluated; take "
                "kind = quality"
            )
        return self
