"""Search for the largest micro-batch of each precision that fits: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage, Training
from raypipe.graph.session import Session
from raypipe.graph.stages import job_of
from raypipe.graph.unit_logs import first_line
from raypipe.hardware import MEMORY_MARGIN, Arithmetic, Hardware, bytes_text
from raypipe.store.ledger import Row
from raypipe.study.recommendation import peak_bytes
from raypipe.study.sweep_settings import ConstraintSettings, SweepSettings
from raypipe.study.trials import Trial, TrialMaker, check_counts_steps, training_stage, trainings

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob

# scatter of peaks: a few MiB (the allocator's granularity) plus about 1 %, so errors are
# weighted by peak + this
_GRANULARITY = 400 * 2**20
#: relative difference between the largest fit and the smallest misfit that ends a search
_RESOLUTION = 1 / 16
_WARMUP_STEPS, _STEPS = 2, 4


def next_micro_batch(fitting: Collection[int], too_large: int | None, most: int) -> int | None:
    """Return the micro-batch to try next; None once the largest that fits is known.

    Args:
        fitting: the ones known to fit.
        too_large: the smallest one known not to fit.
        most: the largest one worth trying.

    """
    best = max(fitting, default=0)
    if best >= most or too_large == 1:
        return None
    if too_large is None:
        return min(2 * best, most) or 1
    if too_large - best <= max(1, int(best * _RESOLUTION)):
        return None
    return (best + too_large) // 2


@dataclass
class _PrecisionSearch:
    """The search for one precision, with the trials so far by micro-batch."""

    precision: str
    found: dict[int, Row] = field(default_factory=dict)
    too_large: int | None = None
    note: str = ""
    failed: bool = False
    trial: Trial | None = None


class Fit:
    """The trials of ``raypipe fit``, one at a time, precision by precision."""

    def __init__(
        self, context: StageContext, maker: TrialMaker, precisions: Sequence[str], most: int
    ) -> None:
        self._context, self._maker, self._most = context, maker, most
        self.searches = [_PrecisionSearch(precision) for precision in precisions]
        self._left = list(self.searches)
        self._running: TrainingJob | None = None

    def next(self) -> TrainingJob | None:
        """Return the next trial; None while one is running."""
        while self._running is None and self._left:
            search = self._left[0]
            size = self._size(search)
            trial = self._trial(search, size) if size is not None else None
            if trial is None or trial.lacks is not None:
                search.note = search.note or (trial.lacks if trial and trial.lacks else "")
                self._left.pop(0)
                continue
            search.trial = trial
            task = trial.training.task(None)
            job = job_of(self._context, trial.unit, task, trial.training.settings)
            self._running = replace(job, measured=True)
            return self._running
        return None

    @property
    def is_over(self) -> bool:
        """Whether every precision's largest micro-batch is known."""
        return not self._left and self._running is None

    def history(self) -> tuple[()]:
        """Return no history: a fit has no scheduler."""
        return ()

    def report(self, trial_id: str, row: dict[str, Any]) -> None:
        """Ignore a logged step."""
        del trial_id, row

    def stopped(self, trial_id: str) -> None:
        """Reject an early stop: a fit has no scheduler."""
        raise RuntimeError(f"{trial_id} was stopped, and nothing stops the trials of a fit")

    def ended(self, trial_id: str, outcome: dict[str, Any] | UnitError) -> None:
        """Record the outcome of a trial."""
        del trial_id
        search, self._running = self._left[0], None
        trial = search.trial
        if trial is None:
            raise RuntimeError("a trial ended that was not begun")
        size = trial.micro_batch
        if not isinstance(outcome, UnitError):
            search.found[size] = outcome
            peak = peak_bytes(outcome)
            said = f"{outcome['samples_per_s']:.4g} samples/s"
            said += f", peak memory {bytes_text(peak)}" if peak else ""
        elif outcome.kind == "out_of_memory":
            search.too_large = size
            said = "out of memory"
        else:
            search.note = said = f"{outcome.kind}: {first_line(outcome.message)}"
            search.failed = True
            self._left.pop(0)
        self._context.say(f"{search.precision}, micro-batch {size}: {said}")

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per precision: its largest micro-batch within the margin, and speed."""
        return [self._row(search) for search in self.searches]

    def _row(self, search: _PrecisionSearch) -> dict[str, Any]:
        size = self._chosen(search)
        row: dict[str, Any] = {"precision": search.precision, "micro_batch": size}
        if size is not None:
            outcome = search.found[size]
            for name in ("accumulation", "workers", "samples_per_s"):
                row[name] = outcome.get(name)
            row["peak_bytes"] = peak_bytes(outcome)
        row["too_large"] = search.too_large
        if not search.note and size == self._most:
            search.note = "all of a worker's share of training.effective_batch"
        return row | {"failed": search.failed, "note": search.note}

    def _size(self, search: _PrecisionSearch) -> int | None:
        """Return the next micro-batch of a search.

        The search finds the largest that fits, then the largest that leaves the margin free.
        """
        if search.note:
            return None
        size = next_micro_batch(search.found, search.too_large, self._most)
        if size is not None or not search.found:
            search.note = "" if size is not None else "micro-batch 1 does not fit"
            return size
        if self._chosen(search) is not None or search.trial is None:
            return None
        accumulates, room = search.trial.accumulation > 1, self._room(search)
        peaks = {
            size: peak
            for size, outcome in search.found.items()
            if ((outcome.get("accumulation") or 1) > 1) == accumulates
            and (peak := peak_bytes(outcome))
        }
        if room is None or len(peaks) < 2:
            return None
        static, slope = memory_line(peaks)
        if not slope:
            return None
        smaller = max(1, min(int((room - static) / slope), max(search.found) - 1))
        return None if smaller in search.found else smaller

    def _chosen(self, search: _PrecisionSearch) -> int | None:
        """Return the largest micro-batch whose measured peak leaves the margin free."""
        room = self._room(search)
        fitting = [
            size
            for size, outcome in search.found.items()
            if room is None or (peak_bytes(outcome) or 0) <= room
        ]
        return max(fitting, default=None)

    def _room(self, search: _PrecisionSearch) -> float | None:
        """Return the memory that torch may use: without the margin, and what others hold.

        These are the CUDA context, the buffers of NCCL, and other processes.
        """
        capacity, others = self._maker.device[1], 0
        for outcome in search.found.values():
            used, own = outcome.get("gpu_memory_used_peak_bytes"), peak_bytes(outcome)
            others = max(others, (used or 0) - (own or 0))
        return None if capacity is None else (1 - MEMORY_MARGIN) * capacity - others

    def _trial(self, search: _PrecisionSearch, size: int) -> Trial | None:
        own = f"{self._maker.sweep.stage}.training"
        return self._maker.trial({f"{own}.micro_batch": size, f"{own}.precision": search.precision})


def memory_line(peaks: Mapping[int, int]) -> tuple[float, float]:
    """Return the bytes at micro-batch 0 and per sample, of the line through two peaks or more.

    It has the least squares of the relative errors, with coefficients of at least 0.
    """
    import numpy as np
    from scipy.optimize import nnls

    sizes, measured = np.array(sorted(peaks.items()), dtype=np.float64).T
    weights = 1 / (measured + _GRANULARITY)
    design = np.stack([np.ones_like(sizes), sizes / sizes.max()], axis=1)
    # scaled by the largest peak and micro-batch, for numbers near 1
    weights, unit = weights / weights.max(), measured.max()
    (static, slope), _ = nnls(weights[:, None] * design, weights * measured / unit)
    return float(static * unit), float(slope * unit / sizes.max())


def fitting(
    configuration: Configuration, stage: str | None, nodes: Sequence[Hardware]
) -> list[TrialMaker]:
    """Return the trial makers of every training stage, or of one.

    Raises:
        ConfigError: there is no such training stage, or none at all.

    """
    makers = []
    for name, training in trainings(configuration, stage):
        check_counts_steps(training, f"{configuration.origin}: {name}.command", "raypipe fit")
        settings = training.settings
        if settings.training.micro_batch is None:
            raise ConfigError(
                f"{configuration.origin}: {name}.command: the script does not receive "
                "{micro_batch}, whose largest value raypipe fit finds"
            )
        axis = AxisSettings(values=_precisions(training))
        sweep = SweepSettings(
            stage=name,
            axes={f"{name}.training.precision": axis},
            constraints=ConstraintSettings(effective_batch=settings.training.effective_batch),
            warmup_steps=_WARMUP_STEPS,
            steps=_STEPS,
            concurrent=1,
        )
        makers.append(TrialMaker(configuration, sweep, nodes, exact=False))
    return makers


def fit_stage(maker: TrialMaker, session: Session) -> list[Row]:
    """Find the largest micro-batch of each precision with trainings of a few steps."""
    name = maker.sweep.stage
    _, training = training_stage(maker.configuration.stages(), name, "--stage")
    scaling, effective = training.settings.scaling, maker.sweep.constraints.effective_batch or 1
    context = StageContext(Stage(name, _nothing, []), session)
    fit = Fit(context, maker, _precisions(training), -(-effective // scaling.most_workers))
    session.launcher.trials(fit, maker.sweep, session.run_dir)
    return [{"stage": name, **row} for row in fit.rows()]


def _precisions(training: Training) -> tuple[str, ...]:
    """Return the precisions to fit; fp8 is among them if the training uses it."""
    return tuple(dict.fromkeys((*get_args(Arithmetic), training.settings.training.precision)))


def _nothing(context: StageContext) -> None:
    """Do nothing: the stage of a fit only gives it a name."""
    del context
