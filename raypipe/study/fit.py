"""Search for the largest micro-batch of each precision that fits: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import Session, StageContext
from raypipe.graph.experiment import Stage, Training
from raypipe.graph.launcher import Trials
from raypipe.graph.stages import job_of
from raypipe.graph.unit_logs import first_line
from raypipe.hardware import MEMORY_MARGIN, Arithmetic, Hardware, bytes_text
from raypipe.store.ledger import Row
from raypipe.study.recommendation import peak_bytes
from raypipe.study.sweep_settings import ConstraintSettings, SweepSettings
from raypipe.study.trials import TrialMaker, check_counts_steps, training_stage, trainings

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob

#: relative difference between the largest fit and the smallest misfit that ends a search
_RESOLUTION = 1 / 16
_WARMUP_STEPS, _STEPS = 2, 4


@dataclass
class _Precision:
    """The search for one precision: the largest micro-batch that fits, and why it has ended."""

    name: str
    largest: int = 0
    outcome: Row | None = None
    too_large: int | None = None
    note: str = ""
    failed: bool = False

    def next(self, most: int) -> int | None:
        """Return the micro-batch to try next; None once the largest that fits is known."""
        if self.note or self.largest >= most or self.too_large == 1:
            return None
        if self.too_large is None:
            return min(2 * self.largest, most) or 1
        if self.too_large - self.largest <= max(1, int(self.largest * _RESOLUTION)):
            return None
        return (self.largest + self.too_large) // 2

    def row(self, most: int) -> Row:
        """Return what was found."""
        note = self.note
        if not note and self.largest in (0, most):
            end = "all of a worker's share of training.effective_batch"
            note = end if self.largest else "micro-batch 1 does not fit"
        measured = self.outcome or {}
        names = ("accumulation", "workers", "samples_per_s") if self.outcome else ()
        return {
            "precision": self.name,
            "micro_batch": self.largest or None,
            **{name: measured.get(name) for name in names},
            **({"peak_bytes": peak_bytes(measured)} if self.outcome else {}),
            **{"too_large": self.too_large, "failed": self.failed, "note": note},
        }


class Fit(Trials):
    """The trials of ``raypipe fit``, one at a time, precision by precision."""

    def __init__(
        self, context: StageContext, maker: TrialMaker, precisions: Sequence[str], most: int
    ) -> None:
        self._context, self._maker, self._most = context, maker, most
        self._searches = [_Precision(precision) for precision in precisions]
        self._left = list(self._searches)
        self._running: TrainingJob | None = None

    def next(self) -> TrainingJob | None:
        """Return the next trial; None while one is running."""
        own = f"{self._maker.sweep.stage}.training"
        while self._running is None and self._left:
            search, trial = self._left[0], None
            if (size := search.next(self._most)) is not None:
                sizes = {f"{own}.micro_batch": size, f"{own}.precision": search.name}
                trial = self._maker.trial(sizes)
            if trial is None or trial.lacks is not None:
                search.note = trial.lacks or "" if trial is not None else search.note
                self._left.pop(0)
                continue
            task, settings = trial.training.task(None), trial.training.settings
            self._running = replace(
                job_of(self._context, trial.unit, task, settings), measured=True
            )
        return self._running

    @property
    def is_over(self) -> bool:
        """Whether every precision's largest micro-batch is known."""
        return not self._left and self._running is None

    def ended(self, trial_id: str, outcome: dict[str, Any] | UnitError) -> None:
        """Record the outcome of a trial."""
        del trial_id
        search, job, self._running = self._left[0], self._running, None
        size = job.plan.micro_batch if job is not None else 0
        if not isinstance(outcome, UnitError):
            if self._leaves_margin(outcome):
                search.largest, search.outcome = size, outcome
            else:
                search.too_large = size
            peak = peak_bytes(outcome)
            said = f"{outcome['samples_per_s']:.4g} samples/s"
            said += f", peak memory {bytes_text(peak)}" if peak else ""
        elif outcome.kind == "out_of_memory":
            search.too_large = size
            said = "out of memory"
        else:
            search.note = said = f"{outcome.kind}: {first_line(outcome.message)}"
            search.failed = True
        self._context.say(f"{search.name}, micro-batch {size}: {said}")

    def rows(self) -> list[Row]:
        """Return one row per precision: its largest micro-batch within the margin, and speed."""
        return [search.row(self._most) for search in self._searches]

    def _leaves_margin(self, outcome: Row) -> bool:
        """Whether a training left memory free beside its own and all that others hold.

        These are the CUDA context, the buffers of NCCL, and other processes.
        """
        capacity = self._maker.device[1]
        used = max(peak_bytes(outcome) or 0, outcome.get("gpu_memory_used_peak_bytes") or 0)
        return capacity is None or used <= (1 - MEMORY_MARGIN) * capacity


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
    context = StageContext(Stage(name, lambda _: None, []), session)
    fit = Fit(context, maker, _precisions(training), -(-effective // scaling.worker_count))
    session.launcher.trials(fit, maker.sweep, session.run_dir)
    return [{"stage": name, **row} for row in fit.rows()]


def _precisions(training: Training) -> tuple[str, ...]:
    """Return the precisions to fit; fp8 is among them if the training uses it."""
    return tuple(dict.fromkeys((*get_args(Arithmetic), training.settings.training.precision)))
