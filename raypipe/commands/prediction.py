"""``raypipe fit --card``: predict memory, speed and energy of a training without a GPU."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raypipe import hardware
from raypipe.cards import calibration
from raypipe.cards.calibration import Calibration, Measurement
from raypipe.commands.configuration import resolve
from raypipe.commands.declarations import PREDICTIONS
from raypipe.commands.report import report
from raypipe.config.document import Document
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Training
from raypipe.graph.identity import fingerprint
from raypipe.hardware import Arithmetic, Gpu, Hardware, bytes_text
from raypipe.report.formatting import duration
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
#: columns that tell predictions apart, and those that a measurement of the same training shares
_IDENTITY = (
    *("stage", "card", "precision", "strategy", "workers"),
    *("gradient_checkpointing", "compile", "optimizer"),
)
_SAME_TRAINING = (
    *("precision", "micro_batch", "workers", "gradient_checkpointing", "compile", "strategy"),
)
_TIMES = "times are of optimizer steps at full sample length; intervals in brackets"


def predict(
    document: Document,
    overrides: Sequence[str],
    card: str,
    *,
    profile: str = "auto",
    stage: str | None = None,
    precisions: Sequence[str] = (),
    checkpointing: bool | None = None,
    cards_per_node: int | None = None,
    file: str | os.PathLike[str] | None = None,
    run_dir: str | None = None,
) -> list[Row]:
    """Return the predictions of every training stage, or of one, on a card or on all of them.

    With a run directory the rows become its table ``card_predictions``, next to its measurements.
    The arguments are those of ``raypipe fit``; ``file`` has further cards.

    Raises:
        ConfigError: an unknown card, stage or precision, a precision that the card does not
            support, or a stage that cannot be predicted.

    """
    known = data_sheets.cards(file)
    every = card.strip().lower() == "all"
    cards = list(known.values()) if every else [data_sheets.resolve(card, known)]
    allowed = [p for p in _FASTEST_FIRST if any(p in each.precisions for each in cards)]
    for precision in precisions:
        if precision not in allowed:
            raise ConfigError(
                f"--precision {precision}: must be one of {', '.join(allowed)} (--card {card})"
            )
    ledger = None if run_dir is None else Ledger.to_read(_existing(run_dir))
    predictor = Predictor(document, overrides, profile, cards_per_node, list(known.values()))
    if every and profile == "auto":  # a profile may have another model
        largest = max(cards, key=lambda each: each.memory_bytes)
        predictor.profile = predictor.resolved(largest).profile
        say(
            f"profile: {predictor.profile} on all cards, as {largest.name} has it (another: "
            "--profile NAME)"
        )
    rows: list[Row] = []
    for each in cards:
        of_card = list(predictor.rows(each, stage, precisions, checkpointing, ledger, best=every))
        rows += _fastest(of_card) if every else of_card
    if every:
        rows.sort(key=lambda row: (row["stage"], -(row.get("samples_per_s") or 0.0)))
    _recommend(rows)
    if run_dir is not None:
        _record(run_dir, rows)
    return rows


@dataclass
class Predictor:
    """Predictions of a configuration on several cards; equal trainings share their recordings."""

    document: Document
    overrides: Sequence[str]
    profile: str = "auto"
    workers: int | None = None
    known: Sequence[Card] = ()
    _forecasts: dict[str, Forecasts] = field(default_factory=dict)

    def rows(
        self,
        card: Card,
        stage: str | None,
        precisions: Sequence[str],
        checkpointing: bool | None,
        ledger: Ledger | None,
        *,
        best: bool,
    ) -> Iterator[Row]:
        """Yield the predictions of each training stage on a card.

        The measurements of a run, given by its ledger, are columns of the rows and calibrate the
        card. ``best`` predicts the fastest precision only.
        """
        configuration = self.resolved(card)
        for name, training in trainings(configuration, stage):
            forecasts, settings = self._forecast(configuration, name, training)
            if not data_sheets.is_predicted(settings.training.precision):
                say(
                    f"{name}.training.precision = {settings.training.precision}: is not predicted; "
                    "measure it on the card (`raypipe fit` without --card)"
                )
            measured = [] if ledger is None else self._measured(ledger, name, card)
            scaling = settings.scaling
            own = scaling.worker_count, scaling.strategy
            same = [row for row in measured if (row.get("workers"), row.get("strategy")) == own]
            if new := [_comparison(forecasts, card, settings, row, name) for row in same]:
                calibration.save(card.name, new)
            factors = calibration.load(card.name)
            for varied in _variants(settings, card, precisions, best=best):
                for thriftier in _thriftier(forecasts, varied, checkpointing):
                    row = forecasts.row(card, thriftier, factors)
                    beside = {"stage": name, "profile": configuration.profile}
                    yield {**row, **beside, **_beside(row, measured)}
                    if row["micro_batch"] == forecasts.most:  # all of the batch fits at once
                        break

    def resolved(self, card: Card) -> Configuration:
        """Return the configuration for a machine with the card."""
        gpu = Gpu(0, "", card.reports, card.memory_bytes, str(card.capability))
        node = replace(hardware.detect(), gpus=(gpu,) * (self.workers or 1))
        return resolve(self.document, self.overrides, self.profile, [node])

    def compared(self, card: Card, rows: Sequence[Row]) -> list[Measurement]:
        """Return the fastest row of each stage of a measured fit over its prediction."""
        configuration = self.resolved(card)
        known = dict(trainings(configuration, None))
        sized = [
            row
            for row in rows
            if row.get("samples_per_s")
            and row.get("micro_batch")
            and data_sheets.is_predicted(row.get("precision"))
        ]
        measurements = []
        for row in _fastest(sized):
            stage = row["stage"]
            forecasts, settings = self._forecast(configuration, stage, known[stage])
            measurements.append(_comparison(forecasts, card, settings, row, stage))
        return measurements

    def _forecast(
        self, configuration: Configuration, name: str, training: Training
    ) -> tuple[Forecasts, TrainStageSettings]:
        """Return the forecasts of a stage with one worker per card, and its settings.

        Forecasts are those of another card if the training is the same.
        """
        from raypipe.cards.forecast import Forecasts
        from raypipe.training.task import TrainTask

        settings: TrainStageSettings = training.settings
        workers = self.workers or settings.scaling.worker_count
        effective = settings.training.effective_batch or workers
        if workers > effective:
            raise ConfigError(
                f"{configuration.origin}: {workers} cards for {name}.training.effective_batch = "
                f"{effective}: each takes a sample of a step at least; give fewer cards"
            )
        settings = settings.with_gpus(1).changed("scaling", workers=workers)
        values = configuration.settings.model_dump(mode="json")
        for key in _SAME_STEPS:
            values[name]["training"].pop(key, None)
        effective = settings.training.effective_batch or 1
        key = fingerprint([name, values, effective, settings.scaling.worker_count])
        if key not in self._forecasts:
            task = training.task(None)
            if not isinstance(task, TrainTask):
                raise ConfigError(
                    f"{configuration.origin}: {name}: cannot be predicted, since another program "
                    "trains; measure it on the card (`raypipe fit` without --card)"
                )
            self._forecasts[key] = Forecasts(task, settings, effective, key, say)
        return self._forecasts[key], settings

    def _measured(self, ledger: Ledger, stage: str, card: Card) -> list[Row]:
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
            and data_sheets.of_device(str(row.get("device")), None, self.known) == card
            and same.issuperset(row.get("point") or ())
            and data_sheets.is_predicted(row.get("precision"))
        ]


def calibrate(
    document: Document,
    overrides: Sequence[str],
    profile: str,
    rows: Sequence[Row],
    nodes: Sequence[Hardware],
) -> None:
    """Calibrate the card of a measured fit by its rows, where its steps can be recorded.

    Nodes with several types of GPUs, and cards that are not listed, are left out.
    """
    gpus = [gpu for node in nodes for gpu in node.gpus]
    try:
        known = data_sheets.cards().values()
        cards = [data_sheets.of_device(gpu.name, gpu.memory_bytes, known) for gpu in gpus]
        card = cards[0] if cards and all(each == cards[0] for each in cards) else None
        if card is not None:
            predictor = Predictor(document, overrides, profile)
            calibration.save(card.name, predictor.compared(card, rows))
    except ConfigError as error:  # what was measured is not lost
        say(f"predictions are not calibrated: {error}")


def _comparison(
    forecasts: Forecasts, card: Card, settings: TrainStageSettings, row: Row, stage: str
) -> Measurement:
    """Return a measured training over its uncalibrated prediction."""
    varied = ("precision", "gradient_checkpointing", "compile")
    settings = _with(settings, **{key: row[key] for key in varied if key in row})
    predicted = forecasts.row(card, settings, Calibration(), size=row["micro_batch"])
    peak = row.get("gpu_peak_bytes") or row.get("peak_bytes")
    identity = settings.training.identity()
    return Measurement(
        key=fingerprint([stage, forecasts.key, identity, row["micro_batch"]]),
        speed=row["samples_per_s"] / predicted["samples_per_s"],
        memory=peak / predicted["peak_bytes"] if peak else None,
    )


def _with(settings: TrainStageSettings, **values: object) -> TrainStageSettings:
    training = settings.training.model_copy(update=values)
    return settings.model_copy(update={"training": training})


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
    precisions = [
        p
        for p in _FASTEST_FIRST
        if p in card.precisions and p not in settings.unusable and p in (wanted or _FASTEST_FIRST)
    ]
    return [_with(settings, precision=p) for p in precisions[: 1 if best else None]]


def _thriftier(
    forecasts: Forecasts, settings: TrainStageSettings, only: bool | None
) -> Iterator[TrainStageSettings]:
    """Yield the settings, then what needs less memory: FSDP, and checkpointing if not fixed."""
    checkpointing = settings.training.gradient_checkpointing if only is None else only
    fixed = only is not None or checkpointing or not forecasts.has_blocks
    for recompute in (checkpointing,) if fixed else (False, True):
        varied = _with(settings, gradient_checkpointing=recompute)
        yield varied
        if varied.scaling.strategy == "ddp" and forecasts.shards:
            scaling = varied.scaling.model_copy(update={"strategy": "fsdp"})
            yield varied.model_copy(update={"scaling": scaling})


def _beside(row: Row, measured: Sequence[Row]) -> Row:
    """Return the columns with the measurement of the same training, if there is one."""
    for trial in measured:
        if all(trial.get(name) == row[name] for name in _SAME_TRAINING):
            return {
                "measured_samples_per_s": trial["samples_per_s"],
                "measured_peak_bytes": trial.get("gpu_peak_bytes"),
            }
    return {}


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest row of each stage; the last one if none fits."""
    ordered = sorted(rows, key=lambda row: row.get("samples_per_s") or 0.0)
    return list({row["stage"]: row for row in ordered}.values())


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


def _existing(location: str) -> RunDirectory:
    """Return the run directory that predictions go to. Raises ConfigError if it is not one."""
    run_dir = RunDirectory.at(location)
    if not run_dir.exists(run_dir.ledger):
        raise ConfigError(
            f"--run-dir {location}: is not a run; predictions go to the directory of a run, or "
            "leave --run-dir out"
        )
    return run_dir


def _record(location: str, rows: Sequence[Row]) -> None:
    """Write the predictions into a run directory, and its report."""
    run_dir = _existing(location)
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


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return predictions as they are printed: few columns, numbers as text."""
    priced = any(row["cost"] is not None for row in rows if row["micro_batch"] is not None)
    several = len({row["stage"] for row in rows}) > 1
    return [_shown(row, several=several, priced=priced) for row in rows]


def conclusion(rows: Sequence[Row]) -> str:
    """Return a sentence for each recommended prediction, and a note on what the times cover."""
    lines = []
    for row in rows:
        if row["recommended"]:
            words = f"{row['card']}, "
            if row["workers"] > 1:
                words = f"{row['workers']} x {row['card']}, {row['strategy']}, "
            words += f"profile {row['profile']}, {row['precision']}, "
            if row["gradient_checkpointing"]:
                words += "gradient checkpointing, "
            words += f"micro-batch {row['micro_batch']} x accumulation {row['accumulation']}"
            why = "takes the least energy (prices: --cards FILE)"
            if row["cost"] is not None:
                why = f"is the cheapest: {row['cost']:.4g}"
            lines.append(f"{row['stage']}: {words} {why}; {row['note']}")
    if any(not row["measurements"] for row in rows):
        lines.append(_TIMES)
    return "\n".join(lines)


def _shown(row: Row, *, several: bool, priced: bool) -> Row:
    fits = row["micro_batch"] is not None
    cards = f"{row['workers']} x {row['card']}, {row['strategy']}"
    cells: Row = {
        **({"stage": row["stage"]} if several else {}),
        "card": row["card"] if row["workers"] == 1 else cards,
        "precision": row["precision"],
        "recompute": "yes" if row["gradient_checkpointing"] else "no",
        "batch": f"{row['micro_batch']} x {row['accumulation']}" if fits else "none",
        "peak": bytes_text(row["peak_bytes"] + row["context_bytes"]),
        "of": bytes_text(row["capacity_bytes"]),
    }
    if not fits:
        return cells | dict.fromkeys(("samples/s", "time", "kWh"), "-")
    speeds = (_rounded(row[f"samples_per_s{end}"]) for end in ("", "_low", "_high"))
    cells |= {
        "samples/s": "{} [{}, {}]".format(*speeds),
        "time": duration(3600 * row["hours"]),
        "kWh": _rounded(row["energy_kwh"]),
    }
    if priced:
        cells["cost"] = "-" if row["cost"] is None else f"{row['cost']:.4g}"
    if row.get("measured_samples_per_s"):
        cells["measured"] = _rounded(row["measured_samples_per_s"])
    return cells


def _rounded(value: float) -> str:
    """Return a number with three significant digits, below a million without an exponent."""
    return f"{float(f'{value:.3g}'):g}"
