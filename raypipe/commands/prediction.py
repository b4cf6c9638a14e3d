"""``raypipe fit --card``: predict memory, speed and energy of a training without a GPU."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raypipe import hardware
from raypipe.cards import calibration
from raypipe.cards.calibration import Calibration, Measurement
from raypipe.commands.configuration import read, resolve
from raypipe.commands.prediction_table import PREDICTIONS
from raypipe.commands.report import report
from raypipe.commands.request import Request
from raypipe.config.document import Document
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Training
from raypipe.graph.identity import fingerprint
from raypipe.hardware import Arithmetic, Gpu, Hardware
from raypipe.store.ledger import Ledger, Row
from raypipe.store.lock import writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import write_table
from raypipe.study.trials import trainings
from raypipe.training import data_sheets
from raypipe.training.batching import KEYS
from raypipe.training.data_sheets import Card

if TYPE_CHECKING:
    from raypipe.cards.forecast import Forecasts
    from raypipe.training.settings import TrainStageSettings

#: keys of a training that recordings of its steps do not depend on
_SAME_STEPS = (*KEYS, "precision", "compile", "gradient_checkpointing", "eval_batch", "log_every")
#: keys of a sweep's point whose training is still one that is predicted
_COMPARABLE = (*KEYS, "precision", "compile", "gradient_checkpointing", "learning_rate", "seed")
_FASTEST_FIRST: tuple[Arithmetic, ...] = ("bf16", "fp16", "tf32", "fp32")
#: columns that tell predictions apart
_IDENTITY = (
    *("stage", "card", "precision", "strategy", "workers"),
    *("gradient_checkpointing", "compile", "optimizer"),
)


@dataclass(frozen=True)
class Wanted:
    """The arguments of a prediction: card or ``all``, cards per machine, file of cards, stage.

    ``precisions`` are those to predict, all if empty; ``checkpointing`` is the only choice of it.
    """

    card: str
    cards_per_node: int | None = None
    file: str | os.PathLike[str] | None = None
    stage: str | None = None
    precisions: Sequence[str] = ()
    checkpointing: bool | None = None


def predict(request: Request, wanted: Wanted) -> list[Row]:
    """Return the predictions of every training stage, or of one, on the cards.

    With a run directory the rows become its table ``card_predictions``, next to its measurements.

    Raises:
        ConfigError: an unknown card, stage or precision, a precision that the card does not
            support, or a stage that cannot be predicted.

    """
    known = data_sheets.cards(wanted.file)
    every = wanted.card.strip().lower() == "all"
    chosen = list(known.values()) if every else [data_sheets.resolve(wanted.card, known)]
    _check_precisions(wanted, chosen)
    if every and request.profile == "auto":
        request = _with_one_profile(request, wanted, chosen)
    ledger = None
    if request.run_dir is not None:
        ledger = Ledger.to_read(existing(request.run_dir))
    predictor = Predictor(request, wanted.cards_per_node, list(known.values()))
    rows: list[Row] = []
    for card in chosen:
        found = list(predictor.rows(card, wanted, ledger, best_precision=every))
        rows += _fastest(found) if every else found
    if every:
        rows.sort(key=lambda row: (row["stage"], -(row.get("samples_per_s") or 0.0)))
    _recommend(rows)
    if request.run_dir is not None:
        record(request.run_dir, rows)
    return rows


def _with_one_profile(request: Request, wanted: Wanted, cards: Sequence[Card]) -> Request:
    """Return the request with the profile of the largest card for all of them.

    A profile may have another model, and cards are compared by the same training.
    """
    largest = max(cards, key=lambda card: card.memory_bytes)
    profile = Predictor(request, wanted.cards_per_node).resolved(largest).profile
    say(f"profile: {profile} on all cards, as {largest.name} has it (another: --profile NAME)")
    return replace(request, profile=profile)


class Predictor:
    """Predictions of a configuration on several cards; equal trainings share their recordings."""

    def __init__(
        self, request: Request, cards_per_node: int | None, known: Sequence[Card] = ()
    ) -> None:
        self._request, self._workers, self._known = request, cards_per_node, known
        self._document: Document = request.document or read(request.path)
        self._forecasts: dict[str, Forecasts] = {}

    def rows(
        self, card: Card, wanted: Wanted, ledger: Ledger | None, *, best_precision: bool
    ) -> Iterator[Row]:
        """Yield the predictions of each training stage on a card.

        Args:
            card: the card, whose profile is chosen as on a machine with it.
            wanted: the stage, None for all, and the precisions.
            ledger: of a run whose measurements are columns of the rows and calibrate the card.
            best_precision: whether to predict the fastest precision only.

        """
        configuration = self.resolved(card)
        for name, training in trainings(configuration, wanted.stage):
            settings = self._settings(configuration, name, training)
            if not data_sheets.is_predicted(settings.training.precision):
                say(
                    f"{name}.training.precision = {settings.training.precision}: is not predicted; "
                    "measure it on the card (`raypipe fit` without --card)"
                )
            forecasts = self._of(configuration, name, training, settings)
            measured = _trials(ledger, name, card, self._known) if ledger is not None else []
            found = self._calibrated(card, settings, forecasts, name, measured)
            for varied in _variants(settings, card, wanted.precisions, best=best_precision):
                for row in _rows(forecasts, card, varied, found, name, measured, wanted):
                    yield {**row, "profile": configuration.profile}

    def resolved(self, card: Card) -> Configuration:
        """Return the configuration for a machine with the card."""
        request, node = self._request, machine(card, self._workers or 1)
        return resolve(self._document, request.overrides, request.profile, [node])

    def _settings(
        self, configuration: Configuration, name: str, training: Training
    ) -> TrainStageSettings:
        """Return the settings of a stage with one worker per card."""
        settings: TrainStageSettings = training.settings
        workers = self._workers or settings.scaling.most_workers
        effective = settings.training.effective_batch or workers
        if workers > effective:
            raise ConfigError(
                f"{configuration.origin}: {workers} cards for {name}.training.effective_batch = "
                f"{effective}: each takes a sample of a step at least; give fewer cards"
            )
        return settings.with_gpus(1).changed("scaling", workers=workers)

    def _of(
        self,
        configuration: Configuration,
        name: str,
        training: Training,
        settings: TrainStageSettings,
    ) -> Forecasts:
        """Return the forecasts of a stage; those of another card if the training is the same."""
        from raypipe.cards.forecast import Forecasts
        from raypipe.training.task import TrainTask

        values = configuration.settings.model_dump(mode="json")
        for key in _SAME_STEPS:
            values[name]["training"].pop(key, None)
        effective = settings.training.effective_batch or 1
        key = fingerprint([name, values, effective, settings.scaling.most_workers])
        if key not in self._forecasts:
            task = training.task(None)
            if not isinstance(task, TrainTask):
                raise ConfigError(
                    f"{configuration.origin}: {name}: cannot be predicted, since another program "
                    "trains; measure it on the card (`raypipe fit` without --card)"
                )
            self._forecasts[key] = Forecasts(task, settings, effective, key, say)
        return self._forecasts[key]

    def _calibrated(
        self,
        card: Card,
        settings: TrainStageSettings,
        forecasts: Forecasts,
        name: str,
        measured: Sequence[Row],
    ) -> Calibration:
        """Return the calibration of a card, with the measurements of this run."""
        scaling = settings.scaling
        own = scaling.most_workers, scaling.strategy
        same = [row for row in measured if (row.get("workers"), row.get("strategy")) == own]
        new = [_comparison(forecasts, card, settings, row, name) for row in same]
        if new:
            calibration.save(card.name, new)
        return calibration.load(card.name)

    def compared(self, card: Card, rows: Sequence[Row]) -> list[Measurement]:
        """Return the fastest row of each stage of a measured fit over its prediction."""
        configuration = self.resolved(card)
        fastest: dict[str, Row] = {}
        for row in sorted(rows, key=lambda row: row.get("samples_per_s") or 0.0):
            sized = row.get("samples_per_s") and row.get("micro_batch")
            if sized and data_sheets.is_predicted(row.get("precision")):
                fastest[row["stage"]] = row
        found, known = [], dict(trainings(configuration, None))
        for stage, row in fastest.items():
            settings = self._settings(configuration, stage, known[stage])
            forecasts = self._of(configuration, stage, known[stage], settings)
            found.append(_comparison(forecasts, card, settings, row, stage))
        return found


def machine(card: Card, number: int) -> Hardware:
    """Return this machine as if it had a number of the cards."""
    gpu = Gpu(0, "", card.reports, card.memory_bytes, str(card.capability))
    return replace(hardware.detect(), gpus=(gpu,) * number)


def _comparison(
    forecasts: Forecasts, card: Card, settings: TrainStageSettings, row: Row, stage: str
) -> Measurement:
    """Return a measured training over its uncalibrated prediction."""
    varied = ("precision", "gradient_checkpointing", "compile")
    update = {key: row[key] for key in varied if key in row}
    training = settings.training.model_copy(update=update)
    settings = settings.model_copy(update={"training": training})
    predicted = forecasts.row(card, settings, Calibration(), size=row["micro_batch"])
    peak = row.get("gpu_peak_bytes") or row.get("peak_bytes")
    return Measurement(
        key=fingerprint([stage, forecasts.key, training.identity(), row["micro_batch"]]),
        speed=row["samples_per_s"] / predicted["samples_per_s"],
        memory=peak / predicted["peak_bytes"] if peak else None,
    )


def calibrate(request: Request, rows: Sequence[Row], nodes: Sequence[Hardware]) -> None:
    """Calibrate the card of a measured fit by its rows, where its steps can be recorded.

    Nodes with several types of GPUs, and cards that are not listed, are left out.
    """
    gpus = [gpu for node in nodes for gpu in node.gpus]
    try:
        known = data_sheets.cards().values()
        found = [data_sheets.of_device(gpu.name, gpu.memory_bytes, known) for gpu in gpus]
        card = found[0] if found and all(each == found[0] for each in found) else None
        if card is not None:
            calibration.save(card.name, Predictor(request, None).compared(card, rows))
    except ConfigError as error:  # what was measured is not lost
        say(f"predictions are not calibrated: {error}")


def _check_precisions(wanted: Wanted, cards: Sequence[Card]) -> None:
    """Reject precisions that none of the cards supports."""
    allowed = [p for p in _FASTEST_FIRST if any(p in card.precisions for card in cards)]
    for precision in wanted.precisions:
        if precision not in allowed:
            words = f"{', '.join(allowed)} (--card {wanted.card})"
            raise ConfigError(f"--precision {precision}: must be one of {words}")


def _variants(
    settings: TrainStageSettings, card: Card, wanted: Sequence[str], *, best: bool
) -> list[TrainStageSettings]:
    """Return the settings with each precision that is wanted, supported and accepted.

    ``wanted`` are the precisions to choose from, all of them if empty; ``best`` limits them to the
    fastest one.
    """
    for precision, reason in settings.unusable.items():
        if precision in wanted:
            raise ConfigError(f"--precision {precision}: {reason}")
    chosen = [p for p in _FASTEST_FIRST if p in card.precisions and p in (wanted or _FASTEST_FIRST)]
    precisions = [p for p in chosen if p not in settings.unusable][: 1 if best else None]
    copies = (settings.training.model_copy(update={"precision": p}) for p in precisions)
    return [settings.model_copy(update={"training": training}) for training in copies]


def _rows(
    forecasts: Forecasts,
    card: Card,
    settings: TrainStageSettings,
    found: Calibration,
    stage: str,
    measured: Sequence[Row],
    wanted: Wanted,
) -> Iterator[Row]:
    """Yield the prediction, and those with less memory if not all of the batch fits at once."""
    for varied in _thriftier(forecasts, settings, wanted.checkpointing):
        row = forecasts.row(card, varied, found)
        yield {"stage": stage, **row, **_beside(row, measured)}
        if row["micro_batch"] == forecasts.most:
            return


def _thriftier(
    forecasts: Forecasts, settings: TrainStageSettings, only: bool | None
) -> Iterator[TrainStageSettings]:
    """Yield the settings, then what needs less memory: FSDP, and checkpointing if not fixed."""
    checkpointing = settings.training.gradient_checkpointing if only is None else only
    fixed = only is not None or checkpointing or not forecasts.has_blocks
    for recompute in (checkpointing,) if fixed else (False, True):
        training = settings.training.model_copy(update={"gradient_checkpointing": recompute})
        varied = settings.model_copy(update={"training": training})
        yield varied
        if varied.scaling.strategy == "ddp" and forecasts.shards:
            scaling = varied.scaling.model_copy(update={"strategy": "fsdp"})
            yield varied.model_copy(update={"scaling": scaling})


def _trials(ledger: Ledger, stage: str, card: Card, known: Sequence[Card]) -> list[Row]:
    """Return the measured trainings of a stage on a card.

    Points of a sweep that vary anything else than what a prediction varies are left out: their
    model or optimizer may be another one.
    """
    same = {f"{stage}.training.{name}" for name in _COMPARABLE}
    return [
        row
        for row in ledger.rows("trials")
        if stage in (row.get("stage"), row.get("trained_stage"))
        and row.get("status") == "succeeded"
        and row.get("samples_per_s")
        and data_sheets.of_device(str(row.get("device")), None, known) == card
        and same.issuperset(row.get("point") or ())
        and data_sheets.is_predicted(row.get("precision"))
    ]


def _beside(row: Row, measured: Sequence[Row]) -> Row:
    """Return the columns with the measurement of the same training, if there is one."""
    same = ("precision", "micro_batch", "workers", "gradient_checkpointing", "compile", "strategy")
    for trial in measured:
        if all(trial.get(name) == row[name] for name in same):
            return {
                "measured_samples_per_s": trial["samples_per_s"],
                "measured_peak_bytes": trial.get("gpu_peak_bytes"),
            }
    return {}


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest row of each stage; the last one if none fits."""
    found = {}
    for row in sorted(rows, key=lambda row: row.get("samples_per_s") or 0.0):
        found[row["stage"]] = row
    return list(found.values())


def _recommend(rows: Sequence[Row]) -> None:
    """Mark the cheapest prediction of each stage; without prices that of the least energy."""
    for row in rows:
        row["recommended"] = False
    for stage in {row["stage"] for row in rows}:
        fitting = [r for r in rows if r["stage"] == stage and r["micro_batch"] is not None]
        priced = [row for row in fitting if row["cost"] is not None]
        key = "cost" if priced else "energy_kwh"
        if best := min(priced or fitting, key=lambda row: row[key], default=None):
            best["recommended"] = True


def existing(location: str) -> RunDirectory:
    """Return the run directory that predictions go to. Raises ConfigError if it is not one."""
    run_dir = RunDirectory.at(location)
    if not run_dir.exists(run_dir.ledger):
        raise ConfigError(
            f"--run-dir {location}: is not a run; predictions go to the directory of a run, or "
            "leave --run-dir out"
        )
    return run_dir


def record(location: str, rows: Sequence[Row]) -> None:
    """Write the predictions into a run directory, and its report."""
    run_dir = existing(location)
    with writing(run_dir, say) as check:
        stamp = {"command_id": secrets.token_hex(4)}
        ledger = Ledger(run_dir, before_writing=check, stamp=stamp)
        stages = {row["stage"] for row in rows}
        earlier = [row for row in ledger.rows(PREDICTIONS.name) if row["stage"] in stages]
        for row in (*({**each, "recommended": False} for each in earlier), *rows):
            named = "/".join(str(row[key]) for key in _IDENTITY if row.get(key) is not None)
            ledger.put(PREDICTIONS.name, {named: row})
        run_id = str((ledger.get("runs", "run") or {}).get("run_id"))
        write_table(run_dir, PREDICTIONS, ledger.rows(PREDICTIONS.name), run_id)
    report(run_dir.location)


def say(text: str) -> None:
    """Print a message where it is not part of the result."""
    print(text, file=sys.stderr, flush=True)
