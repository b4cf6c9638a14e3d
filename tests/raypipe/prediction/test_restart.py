"""The choice after an out-of-memory error, with forecasts whose numbers are written down."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from example_tasks import Regression, job

from raypipe.errors import BatchLimit, ConfigError, UnitError
from raypipe.hardware import Gpu
from raypipe.prediction import calibration, step
from raypipe.prediction.calibration import Calibration, Measured
from raypipe.prediction.cards import Card
from raypipe.prediction.memory import outside
from raypipe.prediction.restart import RestartChoice
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import train_to_the_end
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import TrainTask

GIB = 2**30
GPU = Gpu(0, "", "NVIDIA L4", 24 * GIB, "8.9")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))


@dataclass
class Written:
    """Forecasts by formulas, in GiB: fixed memory that FSDP shards, and memory per sample."""

    fixed: float = 4.0
    sample: float = 1.0
    deadline: float = 0.0

    def reserved(
        self, card: Card, settings: TrainStageSettings, size: int, at: int | None = None
    ) -> int:
        training = settings.training
        fixed = self.fixed / (2 if settings.scaling.strategy == "fsdp" else 1)
        sample = self.sample / (4 if training.gradient_checkpointing else 1)
        if training.precision == "bf16":
            fixed, sample = fixed + 1, sample / 2
        return int((fixed + sample * size) * GIB)

    def row(
        self, card: Card, settings: TrainStageSettings, found: Calibration, size: int
    ) -> dict[str, Any]:
        training = settings.training
        speed = 100 * size / (size + 1)  # small micro-batches are slow
        speed *= 0.75 if training.gradient_checkpointing else 1
        speed *= 0.9 if settings.scaling.strategy == "fsdp" else 1
        speed *= 2 if training.precision == "bf16" else 1
        return {
            "samples_per_s": speed,
            "peak_bytes": round(self.reserved(card, settings, size) * found.memory),
            "context_bytes": outside(settings.scaling.most_workers),
            "capacity_bytes": card.memory_bytes,
        }


class Shrinking(Written):
    """Forecasts that differ with each question, as where a phase of several failed."""

    def reserved(
        self, card: Card, settings: TrainStageSettings, size: int, at: int | None = None
    ) -> int:
        self.fixed -= 0.1
        return super().reserved(card, settings, size, at)


class Long(Regression):
    """Samples of 64 that can be of 32."""

    length = 64

    def shortened(self) -> tuple[TrainTask, str] | None:
        shorter = Long()
        shorter.length = 32
        return (shorter, "samples of at most 32") if self.length == 64 else None


def failed(*on_oom: str, workers: int = 1, task: TrainTask | None = None) -> TrainingJob:
    share = 32 // workers
    made = job(task or Regression(), Path("no"), (share, 1, 32, workers))
    scaling = made.settings.scaling.model_copy(update={"gpus_per_worker": 1.0})
    update = {"on_oom": on_oom, "scaling": scaling}
    return replace(made, settings=made.settings.model_copy(update=update))


def full(job: TrainingJob) -> UnitError:
    limit = BatchLimit("training", job.plan.micro_batch)
    return UnitError("fit", "out_of_memory", "full", limit)


def choice(written: Written, *said: list[str], gpus: tuple[Gpu, ...] = (GPU,)) -> RestartChoice:
    say = said[0].append if said else lambda text: None
    return RestartChoice(gpus, say, lambda job: written)  # type: ignore[arg-type, return-value]


def state(job: TrainingJob) -> tuple[int, list[str]]:
    training = job.settings.training
    on = {
        "gradient_checkpointing": training.gradient_checkpointing,
        "fsdp": job.settings.scaling.strategy == "fsdp",
        "bf16": training.precision == "bf16",
    }
    return job.plan.micro_batch, [name for name, value in on.items() if value]


@pytest.mark.parametrize(
    ("written", "on_oom", "workers", "chosen"),
    [
        # 16 samples fit as they are, and recomputation is slower
        (Written(sample=1), ["gradient_checkpointing"], 1, (16, [])),
        # 1 sample fits, or 4 with recomputation, which is faster
        (Written(sample=10), ["gradient_checkpointing"], 1, (4, ["gradient_checkpointing"])),
        # FSDP costs less than recomputation
        (Written(30, 0.5), ["gradient_checkpointing", "fsdp"], 2, (8, ["fsdp"])),
        (Written(40, 3), ["gradient_checkpointing", "fsdp"], 2,
         (2, ["gradient_checkpointing", "fsdp"])),
        # one worker has nothing to shard
        (Written(sample=1), ["fsdp"], 1, (16, [])),
        # bf16 is faster, but it changes the losses: only where nothing else fits
        (Written(sample=1), ["bf16"], 1, (16, [])),
        (Written(sample=30), ["bf16", "gradient_checkpointing"], 1,
         (2, ["gradient_checkpointing"])),
        (Written(sample=30), ["bf16"], 1, (1, ["bf16"])),
    ],
)  # fmt: skip
def test_the_fastest_allowed_settings_that_fit_are_chosen(
    written: Written, on_oom: list[str], workers: int, chosen: tuple[int, list[str]]
) -> None:
    asked = failed(*on_oom, workers=workers)
    found = choice(written)(asked, full(asked))
    assert found is not None
    assert state(found[0]) == chosen
    assert found[0].plan.effective_batch == 32
    assert found[0].plan.micro_batch * found[0].plan.accumulation * workers == 32


def test_the_message_says_what_and_why() -> None:
    asked, said = failed("gradient_checkpointing"), list[str]()
    found = choice(Written(sample=10), said)(asked, full(asked))
    assert found is not None
    assert found[1] == (
        "again with micro-batch 4 x accumulation 8, gradient checkpointing: predicted 14.5 GiB of "
        "24.0 GiB, 0.62 of the speed"
    )
    assert said == ["out of memory: predicting which settings fit"]


def test_a_failure_that_was_not_predicted_corrects_the_prediction() -> None:
    """12 GiB were predicted: what needs nearly as much does not fit either."""
    asked = failed("gradient_checkpointing")
    written = Written(4, 0.25)
    found = choice(written)(asked, full(asked))
    assert found is not None
    assert state(found[0]) == (16, [])
    assert "predicted 16.2 GiB of 24.0 GiB" in found[1]  # 8 GiB, in the ratio of the failure
    flat = Written(11.5, 0.5 / 32)  # half a micro-batch saves 2 %, below the margin
    found = choice(flat)(asked, full(asked))
    assert found is not None
    assert state(found[0]) == (1, ["gradient_checkpointing"])
    assert found[1].endswith("nothing allowed needs less")


def test_each_attempt_needs_less_so_that_they_end() -> None:
    """A card on which nothing fits, whatever is predicted."""
    written, tried, told = Written(4, 8), list[TrainingJob](), list[str]()

    def launch(job: TrainingJob) -> dict[str, Any]:
        tried.append(job)
        raise full(job)

    def on_failure(job: TrainingJob, error: UnitError, outcome: str) -> None:
        told.append(outcome)

    asked = failed("gradient_checkpointing", "bf16")
    with pytest.raises(UnitError):
        train_to_the_end(asked, launch, on_failure, choice(written))
    needs = [written.reserved(Any, each.settings, each.plan.micro_batch) for each in tried]  # type: ignore[arg-type]
    assert needs[:-1] == sorted(set(needs[:-1]), reverse=True)
    assert [each.attempt for each in tried] == list(range(1, len(tried) + 1))
    assert told[-1] == "gave up"
    # the last step cannot be predicted to help: the fixed order goes on with it
    assert told[-2] == "again with bf16"


@pytest.mark.parametrize("calibrated", [1.0, 1.1])
def test_settings_that_failed_are_not_chosen_again(calibrated: float) -> None:
    """The row's calibrated peak is rounded, here down: it is not compared with the failed one."""
    calibration.save("L4", [Measured(key="a", speed=1.0, memory=calibrated)])
    choose = choice(Written(4, 29))  # 33 GiB for one sample
    found = choose(asked := failed("fsdp"), full(asked))
    assert found is not None
    assert state(found[0]) == (1, [])
    assert choose(found[0], full(found[0])) is None
    one = replace(asked, plan=replace(asked.plan, micro_batch=1, accumulation=32))
    assert choice(Shrinking(4, 29))(one, full(one)) is None


def test_bf16_is_left_out_on_a_card_that_lacks_it() -> None:
    old = replace(GPU, name="Tesla T4", memory_bytes=16 * GIB, compute_capability="7.5")
    asked = failed("bf16")
    found = choice(Written(sample=20), gpus=(old,))(asked, full(asked))
    assert found is not None
    assert state(found[0]) == (1, [])


def test_samples_are_shortened_where_nothing_else_fits() -> None:
    asked = failed("shorten", "bf16", task=Long())
    halves = {64: Written(sample=60), 32: Written(sample=15)}
    made = RestartChoice([GPU], lambda text: None, lambda job: halves[job.task.length])  # type: ignore[attr-defined, arg-type, return-value]
    found = made(asked, full(asked))
    assert found is not None
    assert state(found[0]) == (1, [])
    assert found[0].task.length == 32  # type: ignore[attr-defined]
    assert ", samples of at most 32: predicted" in found[1]


def test_the_fixed_order_decides_where_nothing_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, said = failed("gradient_checkpointing"), list[str]()
    cpu = asked.settings.scaling.model_copy(update={"gpus_per_worker": 0.0})
    on_cpu = replace(asked, settings=asked.settings.model_copy(update={"scaling": cpu}))
    choose = choice(Written(), said)
    assert choose(on_cpu, full(asked)) is None
    assert choose(failed(), full(asked)) is None  # halves, as ever
    assert choice(Written(), said, gpus=())(asked, full(asked)) is None
    with monkeypatch.context() as patch:
        patch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>4")
        assert choose(asked, full(asked)) is None
    assert said == []
    other = replace(GPU, name="NVIDIA Unknown")
    assert choice(Written(), said, gpus=(other,))(asked, full(asked)) is None
    assert said == [
        "out of memory: on_oom is followed in its order: NVIDIA Unknown is not a listed card"
    ]

    eighth = asked.settings.training.model_copy(update={"precision": "fp8"})
    in_fp8 = replace(asked, settings=asked.settings.model_copy(update={"training": eighth}))
    assert choose(in_fp8, full(asked)) is None
    assert said[-1].endswith("fp8 is not predicted")

    def refused(job: TrainingJob) -> Any:
        raise ConfigError("it needs values")

    assert RestartChoice([GPU], said.append, refused)(asked, full(asked)) is None
    assert said[-1].endswith("it needs values")

    ranged = asked.settings.scaling.model_copy(update={"workers": (1, 4)})
    elastic = replace(asked, settings=asked.settings.model_copy(update={"scaling": ranged}))
    assert choice(Written(), said)(elastic, full(asked)) is None
    assert said[-1].endswith("scaling.workers = (1, 4) is elastic, which is not predicted")


def test_a_prediction_that_failed_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    asked, said, asked_for = failed("gradient_checkpointing"), list[str](), list[TrainingJob]()

    def broken(job: TrainingJob) -> Any:
        asked_for.append(job)
        raise KeyError("bf16")

    choose = RestartChoice([GPU], said.append, broken)
    assert choose(asked, full(asked)) is None
    order = (
        "out of memory: on_oom is followed in its order: the prediction failed (KeyError: 'bf16')"
    )
    assert said == ["out of memory: predicting which settings fit", order]
    assert "in broken" in caplog.text
    assert choose(asked, full(asked)) is None
    assert len(asked_for) == 1
    assert len(said) == 2


def test_the_time_limit_starts_when_no_other_recording_runs() -> None:
    written, ended = Written(), threading.Event()
    limits: list[float] = []

    def other() -> None:
        with step.RECORDING:
            held.set()
            ended.wait(10)
            time.sleep(0.02)
            limits.append(time.monotonic())

    held = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    held.wait(10)
    asked = failed("gradient_checkpointing")
    choose = RestartChoice([GPU], lambda text: ended.set(), lambda job: written)  # type: ignore[arg-type, return-value]
    assert choose(asked, full(asked)) is not None
    thread.join()
    assert written.deadline >= limits[0] + 60


def test_workers_that_share_a_card_have_a_part_of_its_memory() -> None:
    asked = failed("gradient_checkpointing")
    half = asked.settings.scaling.model_copy(update={"gpus_per_worker": 0.5})
    asked = replace(asked, settings=asked.settings.model_copy(update={"scaling": half}))
    found = choice(Written(sample=1))(asked, full(asked))
    assert found is not None
    assert "of 12.0 GiB" in found[1]
