"""``raypipe fit --card``: predict memory, speed and energy of a training without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raypipe import hardware
from raypipe.commands.configuration import resolve
from raypipe.config.document import Document
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Training
from raypipe.hardware import Gpu, Precision, bytes_text
from raypipe.report.formatting import duration
from raypipe.store.ledger import Row
from raypipe.study.sweep import trainings
from raypipe.training import data_sheets
from raypipe.training.data_sheets import Card

if TYPE_CHECKING:
    from raypipe.cards.forecast import Forecasts
    from raypipe.training.settings import TrainStageSettings

_FASTEST_FIRST: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32")
_MEASURE = "measure it on the card (`raypipe fit` without --card)"
_TIMES = "predicted: times are of optimizer steps at full sample length; intervals in brackets"


def predict(
    document: Document,
    overrides: Sequence[str],
    card: str,
    *,
    profile: str = "auto",
    stage: str | None = None,
) -> list[Row]:
    """Return the predictions of every training stage, or of one, on a card or on all of them.

    The arguments are those of ``raypipe fit``. All cards are compared by the same training, each
    with its fastest precision.

    Raises:
        ConfigError: an unknown card or stage, or a stage that cannot be predicted.

    """
    known = data_sheets.cards()
    every = card.strip().lower() == "all"
    cards = list(known.values()) if every else [data_sheets.resolve(card, known)]
    if every and profile == "auto":  # a profile may have another model
        largest = max(cards, key=lambda each: each.memory_bytes)
        profile = resolve(document, overrides, profile, [_machine(largest)]).profile
        _say(f"profile: {profile} on all cards, as {largest.name} has it (another: --profile NAME)")
    rows: list[Row] = []
    forecasts: dict[str, Forecasts] = {}  # recordings take seconds, and all cards share them
    for each in cards:
        configuration = resolve(document, overrides, profile, [_machine(each)])
        for name, training in trainings(configuration, stage):
            section: TrainStageSettings = training.settings
            workers = section.scaling.worker_count
            settings = section.with_gpus(1).changed("scaling", workers=workers)
            if name not in forecasts:
                forecasts[name] = _forecasts(configuration, name, training, settings)
            of_card = list(_rows(forecasts[name], settings, each, fastest=every))
            named = {"stage": name, "profile": configuration.profile}
            chosen = sorted(of_card, key=_speed)[-1:] if every else of_card
            rows += [{**row, **named} for row in chosen]
    if every:
        rows.sort(key=lambda row: (row["stage"], -_speed(row)))
    fitting = [row for row in rows if row["micro_batch"] is not None]
    by_energy = sorted(fitting, key=lambda row: row["energy_kwh"])
    # the last of equal keys is kept: the row that takes the least energy
    thriftiest = {row["stage"]: row for row in reversed(by_energy)}
    for row in rows:
        row["recommended"] = row is thriftiest.get(row["stage"])
    return rows


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return predictions as they are printed: few columns, numbers as text."""
    found = []
    for row in rows:
        fits = row["micro_batch"] is not None
        speeds = (_rounded(row.get(f"samples_per_s{end}", 0.0)) for end in ("", "_low", "_high"))
        line = {
            "stage": row["stage"],
            "card": _machines(row),
            "precision": row["precision"],
            "recompute": "yes" if row["gradient_checkpointing"] else "no",
            "batch": f"{row['micro_batch']} x {row['accumulation']}" if fits else "none",
            "peak": bytes_text(row["peak_bytes"] + row["context_bytes"]),
            "of": bytes_text(row["capacity_bytes"]),
            "samples/s": "{} [{}, {}]".format(*speeds) if fits else "-",
            "time": duration(3600 * row["hours"]) if fits else "-",
            "kWh": _rounded(row["energy_kwh"]) if fits else "-",
        }
        found.append(line)
    return found


def conclusion(rows: Sequence[Row]) -> str:
    """Return a sentence for each recommended prediction, and a note on what the times cover."""
    lines = []
    for row in rows:
        if row["recommended"]:
            words = [_machines(row), f"profile {row['profile']}", row["precision"]]
            words += ["gradient checkpointing"] if row["gradient_checkpointing"] else []
            batch = f"micro-batch {row['micro_batch']} x accumulation {row['accumulation']}"
            lines.append(f"{row['stage']}: {', '.join([*words, batch])} takes the least energy")
    return "\n".join([*lines, _TIMES])


def _machine(card: Card) -> hardware.Hardware:
    """Return this machine as if it had the card."""
    gpu = Gpu(0, "", card.reports, card.memory_bytes, str(card.capability))
    return replace(hardware.detect(), gpus=(gpu,))


def _forecasts(
    configuration: Configuration, name: str, training: Training, settings: TrainStageSettings
) -> Forecasts:
    """Return the forecasts of a stage with one worker per card. Raises ConfigError."""
    from raypipe.cards.forecast import Forecasts
    from raypipe.training.task import TrainTask

    task = training.task(None)
    if not isinstance(task, TrainTask):
        raise ConfigError(
            f"{configuration.origin}: {name}: cannot be predicted, since another program trains; "
            f"{_MEASURE}"
        )
    effective = settings.training.effective_batch or settings.scaling.worker_count
    return Forecasts(task, settings, effective, _say)


def _rows(
    forecasts: Forecasts, settings: TrainStageSettings, card: Card, *, fastest: bool
) -> Iterator[Row]:
    """Yield the predictions of a training in each precision that the card supports.

    Where the batch does not fit at once, what needs less memory follows.
    """
    precisions = [p for p in _FASTEST_FIRST if p in card.precisions and p not in settings.unusable]
    for precision in precisions[: 1 if fastest else None]:
        for varied in _thriftier(forecasts, settings.changed("training", precision=precision)):
            row = forecasts.row(card, varied)
            yield row
            if row["micro_batch"] == forecasts.most:
                break


def _thriftier(forecasts: Forecasts, settings: TrainStageSettings) -> Iterator[TrainStageSettings]:
    """Yield the settings, then what needs less memory: FSDP, and gradient checkpointing."""
    recomputes = settings.training.gradient_checkpointing
    shards = forecasts.has_blocks and settings.scaling.worker_count > 1
    for recompute in (recomputes,) if recomputes or not forecasts.has_blocks else (False, True):
        varied = settings.changed("training", gradient_checkpointing=recompute)
        yield varied
        if varied.scaling.strategy == "ddp" and shards:
            yield varied.changed("scaling", strategy="fsdp")


def _speed(row: Row) -> float:
    return row.get("samples_per_s") or 0.0


def _say(text: str) -> None:
    """Print a message where it is not part of the result."""
    print(text, file=sys.stderr, flush=True)


def _machines(row: Row) -> str:
    """Return the cards of a prediction in words."""
    several = f"{row['workers']} x {row['card']}, {row['strategy']}"
    return row["card"] if row["workers"] == 1 else several


def _rounded(value: float) -> str:
    """Return a number with three significant digits, below a million without an exponent."""
    return f"{float(f'{value:.3g}'):g}"
