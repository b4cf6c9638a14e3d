"""Machine, workloads, and the trainings and predictions that the parts are made of."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd

import raypipe as rp
from raypipe.hardware import Precision, detect, supported_precisions
from raypipe.provenance import git_commit, package_version
from raypipe.training import data_sheets

Row = dict[str, Any]

#: the card of a rehearsal: the small language model fills it with some hundred samples
REHEARSAL_CARD = "Rehearsal card"
_REHEARSAL = data_sheets.Card(
    REHEARSAL_CARD,
    "rehearsal card",
    680 * 2**20,
    1e11,
    {"fp32": 1e12, "bf16": 2e12},
    16e9,
    100,
    8.0,
)


@dataclass(frozen=True)
class Machine:
    """Device and software of a measurement; in a rehearsal the CPU."""

    device: str
    gpus: int
    uuid: str | None
    memory_bytes: int | None
    capability: str | None
    driver: str | None
    torch: str | None
    commit: str | None
    rehearsal: bool

    @classmethod
    def here(cls, *, rehearsal: bool) -> Machine:
        """Return this machine; in a rehearsal without its GPUs."""
        hardware = detect()
        gpus = () if rehearsal else hardware.gpus
        first = gpus[0] if gpus else None
        return cls(
            device=first.name if first else "cpu",
            gpus=len(gpus),
            uuid=first.uuid if first else None,
            memory_bytes=first.memory_bytes if first else None,
            capability=first.compute_capability if first else None,
            driver=hardware.driver if first else None,
            torch=package_version("torch"),
            commit=git_commit(),
            rehearsal=rehearsal,
        )

    @property
    def columns(self) -> Row:
        """The columns of every row."""
        names = ("device", "driver", "torch", "commit", "rehearsal")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Workload:
    """A training of a shipped configuration, and its overrides; a rehearsal has the small ones.

    ``precision`` is that of its GPU profile.
    """

    config: str
    overrides: Mapping[str, Any]
    small: Mapping[str, Any]
    stage: str = "train"
    precision: Precision = "bf16"


_SMALL_LM = {"data.source": "random", "data.held_out": 16, "model": "tiny"}
_SMALL_TRANSFORMER = {
    **{"data.source": "random", "data.samples": 2000, "data.held_out": 64},
    **{"model.numeric": 8, "model.hidden": 64, "model.layers": 1},
}
_PABBO = "train_small.pabbo"
#: two precisions draw different dropout masks where their attention kernels differ
NO_DROPOUT = ("language model without dropout", "transformer without dropout")
WORKLOADS = {
    "lm_pretrain": Workload(
        "lm_pretrain", {"data.source": "random", "data.held_out": 16}, _SMALL_LM
    ),
    "transformer": Workload("transformer", {}, _SMALL_TRANSFORMER),
    NO_DROPOUT[0]: Workload("lm_pretrain", {"model.dropout": 0.0, "model.context": 512}, _SMALL_LM),
    NO_DROPOUT[1]: Workload(
        "transformer", {"model.dropout": 0.0}, {**_SMALL_TRANSFORMER, "model.dropout": 0.0}
    ),
    "summarization": Workload(
        "summarization",
        {"model": "t5_220m", "train.memory_trial": 0},
        {
            "model": {
                **{"vocabulary": 600, "width": 32, "heads": 2, "head_width": 16},
                **{"feed_forward": 64, "layers": 1, "decoder_layers": 1},
            },
            **{"data.source_length": 32, "data.target_length": 8},
        },
    ),
    "teleclass": Workload(
        "teleclass",
        {},
        {
            **{"encode.dimensions": 32, "train.classifier.hidden": 32},
            **{"train.classifier.vocabulary": 600, "train.classifier.length": 16},
        },
        precision="fp32",
    ),
    "pabbo_lda": Workload(
        "pabbo_lda",
        {f"{_PABBO}.horizon": 8},  # recording the steps of 64 duels takes minutes
        {
            **{f"{_PABBO}.horizon": 3, f"{_PABBO}.policy_batch": 4},
            f"{_PABBO}.evaluation.functions": 2,
        },
        "train_small",
        "fp32",
    ),
}


@dataclass(frozen=True)
class Trained:
    """Outcome of a training: its row of ``trials``, and its rows of the other tables.

    ``error`` says why there is no result.
    """

    run_dir: str
    trial: Row
    steps: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    error: str | None = None

    def columns(self, *names: str) -> Row:
        """Return columns of the trial, and the error."""
        return {name: self.trial.get(name) for name in names} | {"error": self.error}


@dataclass(frozen=True)
class Bench:
    """A part's machine, folders and sizes.

    Args:
        machine: that is measured.
        part: the name of the part.
        work: the folder of run directories, by part.
        out: the folder of the results.
        quick: whether a card is there for minutes only.

    """

    machine: Machine
    part: str
    work: Path
    out: Path
    quick: bool = False

    def pick(self, full: Any, quick: Any, rehearsal: Any) -> Any:
        """Return the value for the size of this measurement."""
        return rehearsal if self.machine.rehearsal else quick if self.quick else full

    def stored(self, key: str) -> list[Row]:
        """Return the rows of a case of this part."""
        return [row for row in read_rows(self.out, self.part) if row["key"] == key]

    def measure(self, key: str, case: Callable[[], Row | list[Row]]) -> list[Row]:
        """Return the rows of a case: those of an earlier call, or new ones; an error is a row."""
        earlier = self.stored(key)
        if earlier and not any(row.get("error") for row in earlier):
            return earlier
        try:
            rows = case()
        except Exception as error:  # costs a row, not the part
            traceback.print_exc()
            rows = {"error": message(error)}
        return self.put(key, *([rows] if isinstance(rows, dict) else rows))

    def put(self, key: str, *rows: Row) -> list[Row]:
        """Store the rows of a case in place of its earlier ones."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"part": self.part, "key": key}
        new = [{**about, **row, **self.machine.columns, "at": at} for row in rows]
        cases: dict[str, list[Row]] = {}
        for row in read_rows(self.out, self.part):
            cases.setdefault(row["key"], []).append(row)
        cases[key] = new  # an earlier one keeps its place
        write_rows(self.out, self.part, [row for each in cases.values() for row in each])
        return new

    def rate(self, name: str) -> float | None:
        """Return a rate of the card that the part ``rates`` has measured."""
        found = [row for row in read_rows(self.out, "rates") if row["key"] == name]
        return found[0].get("rate") if found else None

    @property
    def folder(self) -> Path:
        """The folder of the part's run directories."""
        return self.work / self.part

    @property
    def cache(self) -> Path:
        """``RAYPIPE_CACHE`` of the part: what one part learns does not change another."""
        return self.folder / "cache"

    @property
    def precisions(self) -> Sequence[Precision]:
        """The precisions to compare, fp32 first."""
        if self.machine.rehearsal:
            return ("fp32", "bf16")
        return supported_precisions(self.machine.capability)

    def precision(self, name: str) -> Precision:
        """Return the precision of a workload's GPU profile; fp32 if the card lacks it."""
        wanted = WORKLOADS[name].precision
        return wanted if wanted in self.precisions else "fp32"

    def short(self, name: str, micro_batch: int, steps: int, log_every: int) -> dict[str, Any]:
        """Return the settings of a short eager training at accumulation 2."""
        return {
            "training.effective_batch": 2 * micro_batch,
            "training.micro_batch": micro_batch,
            "training.precision": self.precision(name),
            "training.compile": False,
            "training.steps": steps,
            "training.log_every": log_every,
            "training.warmup_steps": 2,
        }

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of the card that CUDA can give, which is less than the total that NVML reports."""
        if self.machine.rehearsal:
            return None
        import torch

        return int(torch.cuda.mem_get_info()[1])

    @cached_property
    def card(self) -> str | None:
        """The name of the card in raypipe's table; None if it is not listed."""
        if self.machine.rehearsal:
            return REHEARSAL_CARD
        found = data_sheets.of_device(self.machine.device, self.machine.memory_bytes or 0)
        return None if found is None else found.name

    def overrides(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides of a workload with one worker.

        Keys of ``values`` are those of the stage's section.
        """
        workload = WORKLOADS[name]
        shipped = workload.small if self.machine.rehearsal else workload.overrides
        given = {"scaling.workers": 1, **values}
        own = {f"{workload.stage}.{key}": value for key, value in given.items()}
        return {**shipped, **own}

    def train(
        self, name: str, label: str, values: Mapping[str, Any], *, on_ray: bool = False
    ) -> Trained:
        """Run a training in this process, or continue it; failures are part of the outcome.

        Args:
            name: the workload.
            label: the name of the run directory.
            values: settings of the stage by key, such as ``training.steps``.
            on_ray: whether Ray runs it, with loader processes. It starts once per part.

        """
        workload, run_dir = WORKLOADS[name], self.folder / label
        given = self.overrides(name, {"training.keep_state": False, **values})
        error = None
        try:
            run = rp.run(
                workload.config, given, run_dir=run_dir, only=[workload.stage], local=not on_ray
            )
        except rp.ConfigError as refused:
            return Trained(str(run_dir), {"status": "refused"}, error=message(refused))
        except rp.RunFailedError as failed:
            run, error = failed.run, message(failed)
        trials = [row for row in rows_of(run, "trials") if row["stage"] == workload.stage]
        trial = trials[-1] if trials else {"status": "failed"}
        steps, samples = rows_of(run, "steps"), rows_of(run, "gpu_samples")
        failures = rows_of(run, "failures")
        return Trained(str(run_dir), trial, steps, samples, failures, error)

    def predict(self, name: str, values: Mapping[str, Any]) -> Row:
        """Return the prediction of a workload on this card: ``raypipe fit --card``.

        It is that of the workload's precision, without gradient checkpointing unless it has it.

        Args:
            name: the workload.
            values: settings of the stage by key.

        Raises:
            ConfigError: the card is not listed.

        """
        if self.card is None:
            raise rp.ConfigError(f"{self.machine.device}: is not in data_sheets.yaml")
        card = _REHEARSAL
        if self.capacity_bytes is not None:
            card = replace(data_sheets.cards()[self.card], memory_bytes=self.capacity_bytes)
        known = {**data_sheets.cards(), self.card: card}
        with patch.object(data_sheets, "cards", lambda: known):
            found = rp.fit(
                WORKLOADS[name].config,
                self.overrides(name, values),
                stage=WORKLOADS[name].stage,
                card=self.card,
            )
        rows = plain(found)
        return next(row for row in rows if row["precision"] == self.precision(name))


def read_rows(folder: Path, name: str) -> list[Row]:
    """Return the rows of a file of the results; none if there is no such file."""
    file = folder / f"{name}.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """Replace the rows of a file of the results; a reader sees the old or the new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{name}.jsonl.new"
    new.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    new.replace(folder / f"{name}.jsonl")


def rows_of(run: rp.Run, table: str) -> list[Row]:
    """Return the rows of a table; none if there is no such table."""
    return plain(run.table(table)) if table in run.tables else []


def plain(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of a frame as JSON has them; what is missing is None."""
    rows: list[Row] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def ratio(value: float | None, other: float | None) -> float | None:
    """Return a quotient; None if one of the two is missing or the divisor is 0."""
    return value / other if value is not None and other else None


def message(error: BaseException) -> str:
    """Return the first line of an error, without the run directory, at most 200 characters."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line.partition(" (run directory")[0][:200]
