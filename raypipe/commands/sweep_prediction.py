"""``raypipe sweep --card``: the points of a sweep on a card, in the order of their start.

Nothing is trained. Order and skipped points are those with which a sweep on that card begins that
has no measurements yet. There, measurements correct the memory model, skipped points are postponed
first, and the sweep's scheduler may end or repeat trials.
"""

from __future__ import annotations

from collections.abc import Iterator

from raypipe.commands.configuration import read, resolve
from raypipe.commands.prediction import Wanted, existing, machine, record, say
from raypipe.commands.request import Request
from raypipe.commands.selection import matrix_or_sweep
from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError
from raypipe.hardware import MEMORY_MARGIN
from raypipe.pipeline.configuration import Configuration
from raypipe.prediction import cards as known_cards
from raypipe.prediction.cards import Card
from raypipe.storage.ledger import Row
from raypipe.sweep.memory import Memory
from raypipe.sweep.objective import with_metric
from raypipe.sweep.prior import Prior, on_card
from raypipe.sweep.recommendation import recommend
from raypipe.sweep.settings import SweepSettings
from raypipe.sweep.stage import NAME as SWEEP
from raypipe.sweep.trials import Trial, TrialMaker, shown, training_stage

#: columns of ``trials`` that are predicted, by what they are called there
_PREDICTED = ("samples_per_s", "step_time_s", "mfu", "energy_j_per_sample", "gpu_peak_bytes")
#: columns that a few steps of a systems sweep do not tell
_OF_TRAINING = ("hours", "hours_low", "hours_high", "energy_kwh", "cost")


def predict_sweep(request: Request, wanted: Wanted) -> list[Row]:
    """Return a prediction for each point of a sweep, those that run first.

    The columns are those of ``card_predictions``, which receives the rows if there is a run
    directory. ``recommended`` is the point that the sweep would recommend if the predictions were
    right; none is if its metric has to be measured.

    Raises:
        ConfigError: an unknown card, no sweep, points that depend on results, or a training that
            cannot be predicted.

    """
    if wanted.card.strip().lower() == "all":
        raise ConfigError(
            "--card all: a sweep is planned for one card; `raypipe fit --card all` compares them"
        )
    card = known_cards.resolve(wanted.card, known_cards.cards(wanted.file))
    if request.run_dir is not None:
        existing(request.run_dir)
    maker = _maker(request, card, wanted.cards_per_node)
    trials = maker.trials()
    try:
        prior = on_card(trials, card, None, say)
    except ConfigError as error:
        raise ConfigError(f"{maker.configuration.origin}: {maker.sweep.stage}: {error}") from error
    rows = list(_rows(maker, trials, prior, card))
    _recommend(maker, rows)
    for row in rows:
        row["point"] = shown(row["point"])
        for name in ("trial_id", "reference", "energy_j_per_sample", "gpu_peak_bytes"):
            row.pop(name, None)
        if maker.sweep.kind == "systems":
            row |= {name: None for name in _OF_TRAINING if name in row}
    if request.run_dir is not None:
        record(request.run_dir, rows)
    return rows


def _maker(request: Request, card: Card, number: int | None) -> TrialMaker:
    """Return the maker of the trials on a machine with a number of the cards."""
    document = request.document or read(request.path)

    def on(cards: int) -> Configuration:
        found = resolve(document, request.overrides, request.profile, [machine(card, cards)])
        return matrix_or_sweep(found, [SWEEP])[0]

    configuration = on(number or 1)
    if configuration.settings.sweep is None:
        raise ConfigError(
            f"{configuration.origin}: has no section sweep; `raypipe fit --card` predicts a single "
            "training"
        )
    where = f"{configuration.origin}: sweep.stage"
    stages, stage = configuration.stages(), configuration.settings.sweep.stage
    _, training = training_stage(stages, stage, where)
    scaling = training.settings.scaling
    cards = number or scaling.most_workers
    if scaling.workers == "auto":
        values = {f"{stage}.scaling.workers": cards}
        configuration = configuration.with_values(values, "--cards-per-node")
    sweep = _finite(with_metric(configuration, training), configuration.origin)
    return TrialMaker(configuration, sweep, [machine(card, cards)], planned=True)


def _finite(sweep: SweepSettings, origin: str) -> SweepSettings:
    """Return a sweep of all points that a search may try; others as they are. Raises ConfigError.

    What a search draws depends on results, which a prediction does not have.
    """
    if not sweep.is_searched:
        return sweep
    kind = f"search = {sweep.search}"
    axes = {}
    for name, axis in sweep.axes.items():
        values = axis.grid or axis.choice
        if values is None:
            raise ConfigError(
                f"{origin}: sweep.axes.{name}: which points {kind} draws from a range depends on "
                "results; for --card give a list of values or {choice: [...]}, or "
                "search = random with scheduler = asha or none"
            )
        axes[name] = AxisSettings(grid=values)
    update = {"axes": axes, "search": "random", "scheduler": None}
    return sweep.model_copy(update=update)


def _rows(maker: TrialMaker, trials: list[Trial], prior: Prior, card: Card) -> Iterator[Row]:
    """Yield the rows of the trials that run, in their order, then of those that are skipped."""
    memory = Memory(card.reports, card.memory_bytes, prior.fits)
    skipped: list[Row] = []
    for trial in prior.ordered(trials):
        training, scaling = trial.training.settings.training, trial.training.settings.scaling
        row: Row = {
            "stage": maker.sweep.stage,
            "card": card.name,
            "precision": training.precision,
            "workers": scaling.most_workers,
            "strategy": scaling.strategy,
            "gradient_checkpointing": training.gradient_checkpointing,
            "compile": training.compile,
            "optimizer": training.optimizer,
            "micro_batch": trial.micro_batch,
            "accumulation": trial.accumulation,
            "effective_batch": training.effective_batch,
            "capacity_bytes": card.memory_bytes,
            **prior.rows.get(trial.unit.key, {}),
            "trial_id": trial.unit.key,
            "point": trial.point,
            "reference": trial.reference,
            "recommended": False,
            "skipped": False,
        }
        verdict = memory.verdict(trial)
        if trial.lacks is not None or verdict.outcome == "does_not_fit":
            skipped.append({**row, "skipped": True, "note": trial.lacks or verdict.reason})
            continue
        if trial.unit.key not in prior.rows:
            yield {**row, "note": f"{trial.precision} is not predicted; the sweep measures it"}
            continue
        if trial.reference:
            row["note"] = f"reference for the losses; {row['note']}"
        if not _leaves_margin(row):
            row["note"] = f"at the limit: may run out of memory; {row['note']}"
        joules, seconds = row["energy_kwh"] * 3.6e6, row["hours"] * 3600
        row["energy_j_per_sample"] = joules / (row["samples_per_s"] * seconds)
        yield {**row, "gpu_peak_bytes": row["peak_bytes"]}
    yield from skipped


def _recommend(maker: TrialMaker, rows: list[Row]) -> None:
    """Mark the point that the sweep would recommend, of those that leave the margin free."""
    sweep = maker.sweep
    if sweep.kind != "systems" or sweep.metric_name not in _PREDICTED:
        return
    as_measured = [
        {**row, "status": "succeeded", "trained_stage": sweep.stage}
        for row in rows
        if not row["skipped"] and "samples_per_s" in row and _leaves_margin(row)
    ]
    best = recommend(as_measured, sweep.metric_name, sweep.direction, sweep.parity_tolerance)
    for row in rows:
        row["recommended"] = best is not None and row["trial_id"] == best.trial_id


def _leaves_margin(row: Row) -> bool:
    room: float = (1 - MEMORY_MARGIN) * row["capacity_bytes"] - row["context_bytes"]
    return float(row["peak_bytes"]) <= room
