from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from example_tasks import Points, Regression, TwoHeads, TwoPhases, by_hand, in_group, job, sample_at
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from raypipe.store import tables as results
from raypipe.store.run_directory import RunDirectory
from raypipe.training.checkpoint import Checkpoint, CheckpointStore, gathered, load_state
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase, learning_rate, stable_end
from raypipe.training.settings import LoaderSettings, TrainingSettings, TrainStageSettings
from raypipe.training.task import Loss, TrainTask
from raypipe.training.telemetry import forget_peaks, host_peak_bytes

CPU = torch.device("cpu")


def run(
    job: TrainingJob, *, losses_too: bool = True, **more: Any
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """The logged losses, the stored weights and the outcome."""
    outcome = train(job, Worker(0, CPU), **more)
    return losses(job) if losses_too else [], weights(job), outcome


def losses(job: TrainingJob) -> list[float]:
    steps = results.read_table(job.run_dir, "steps")
    assert list(steps["step"]) == list(range(1, len(steps) + 1))
    return list(steps["loss"])


def weights(job: TrainingJob) -> dict[str, Tensor]:
    return load_tensors(job.run_dir.read(job.run_dir.model(job.trial_id)))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rel: float) -> None:
    assert found.keys() == expected.keys()
    difference = math.sqrt(sum(float((found[k] - expected[k]).square().sum()) for k in expected))
    norm = math.sqrt(sum(float(expected[k].square().sum()) for k in expected))
    assert difference <= rel * norm


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class Own(Regression):
    """Momentum with a rate of its own for the last layer, and a schedule of its own."""

    def optimizer(self, model: nn.Module, training: TrainingSettings) -> torch.optim.Optimizer:
        assert isinstance(model, nn.Sequential)
        rate, last = training.learning_rate, list(model[-1].parameters())
        first = list(model[:-1].parameters())
        groups = [{"params": last, "lr": 2 * rate}, {"params": first, "lr": rate}]
        return torch.optim.SGD(groups, momentum=0.9)

    def learning_rate(self, training: TrainingSettings, phase: Phase, step: int) -> float:
        return phase.learning_rate / (1 + step)


@pytest.mark.parametrize("task", [TwoPhases(), Own()])
def test_a_task_may_have_phases_an_optimizer_and_a_schedule_of_its_own(
    tmp_path: Path, task: TrainTask
) -> None:
    asked = job(task, tmp_path, (4, 4, 16, 1), warmup_steps=2)
    expected, trained = by_hand(asked)
    found, stored, _ = run(asked)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert_close(stored, trained, 1e-10)
    steps, two = results.read_table(asked.run_dir, "steps"), isinstance(task, TwoPhases)
    assert list(steps["phase"]) == (["first"] * 4 + ["second"] * 3 if two else ["train"] * 7)
    if not two:
        assert list(steps["lr"])[:3] == pytest.approx([0.01, 0.005, 0.01 / 3])


RESUMED: dict[str, tuple[Callable[..., TrainTask], dict[str, Any]]] = {
    "dropout": (partial(Regression, dropout=0.3), {"eval_every": 2, "warmup_steps": 2}),
    "loader process": (Regression, {"loader": LoaderSettings(workers=1)}),
    "parameters without a gradient yet": (TwoHeads, {"weight_decay": 0.1}),
    "tied weights": (partial(Regression, tied=True), {}),
    "recomputed activations": (Regression, {"gradient_checkpointing": True}),
    "groups in another order than the weights": (Own, {}),
    "groups by dimension": (Regression, {"weight_decay_on": "matrices", "weight_decay": 0.1}),
    "muon": (Regression, {"optimizer": "muon", "weight_decay": 0.1}),
    "half-precision weights": (
        partial(Regression, dtype=torch.float32),
        {"optimizer": "adafactor", "weights": "bf16", "precision": "bf16"},
    ),
}


@pytest.mark.parametrize("fail_at", [1, 3, 4, 6])
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, case: str, fail_at: int
) -> None:
    build, given = RESUMED[case]
    jobs = [
        job(build(fail_at=at), tmp_path / folder, (5, 4, 16, 1), checkpoint_every=3, **given)
        for folder, at in (("whole", None), ("cut", fail_at), ("cut", None))
    ]
    _, trained, outcome = run(jobs[0])
    with pytest.raises(ConnectionError):
        run(jobs[1])
    _, stored, again = run(jobs[2])
    assert_equal(stored, trained)
    assert again.get("eval_mse") == outcome.get("eval_mse")
    one, other = (results.read_table(j.run_dir, "steps").drop(columns="samples_per_s")
                  for j in (jobs[0], jobs[2]))  # fmt: skip
    assert one.equals(other)


@pytest.mark.parametrize(
    ("seconds", "given", "expected"),
    [
        (0.0, {}, list(range(1, 8))),  # 7 steps, each a tenth at most
        (1e6, {}, [7]),
        (1e6, {"checkpoint_every": 3}, [3, 6, 7]),
        # the state after the last step is three times as large as the weights
        (1e6, {"keep_state": False}, []),
        (1e6, {"checkpoint_every": 7, "keep_state": False}, []),
        (1e6, {"checkpoint_every": 3, "keep_state": False}, [3, 6]),
    ],
)
def test_a_checkpoint_is_saved_when_a_restart_would_lose_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, given: Any, expected: list[int]
) -> None:
    monkeypatch.setattr("raypipe.training.loop.SAVE_S", seconds)
    asked = job(Regression(), tmp_path, keep_checkpoints=100, **given)
    run(asked)
    saved = asked.run_dir.list(asked.run_dir.checkpoints("fit"))
    assert saved == [f"step_{step:08}" for step in expected]


def test_a_damaged_newest_checkpoint_costs_its_steps_only(tmp_path: Path) -> None:
    """The one before it is taken, and no step is in the table twice."""
    expected, trained, _ = run(job(Regression(), tmp_path / "whole"))
    asked = job(Regression(fail_at=6), tmp_path / "cut", checkpoint_every=2)
    with pytest.raises(ConnectionError):
        run(asked)
    newest = f"{asked.run_dir.checkpoints('fit')}/step_00000006/state.pt"
    Path(newest).write_bytes(Path(newest).read_bytes()[:-1])
    found, stored, _ = run(job(Regression(fail_at=3), tmp_path / "cut", checkpoint_every=2))
    assert found == expected
    assert_equal(stored, trained)


def test_a_finished_run_started_again_does_nothing(tmp_path: Path) -> None:
    expected, trained, outcome = run(job(Regression(), tmp_path))
    found, stored, again = run(job(Regression(fail_at=0), tmp_path))
    assert found == expected
    assert_equal(stored, trained)
    assert (again["loss_final"], again["steps"]) == (outcome["loss_final"], 7)


def test_a_smaller_cut_continues_the_same_curve(tmp_path: Path) -> None:
    expected, trained, _ = run(job(Regression(), tmp_path / "whole"))
    with pytest.raises(ConnectionError):
        run(job(Regression(fail_at=5), tmp_path / "cut", (16, 1, 16, 1), checkpoint_every=2))
    found, stored, _ = run(job(Regression(), tmp_path / "cut", (4, 4, 16, 1)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert_close(stored, trained, 1e-10)


def test_the_seed_decides_the_run(tmp_path: Path) -> None:
    first, _, _ = run(job(Regression(dropout=0.3), tmp_path / "a", seed=5))
    again, _, _ = run(job(Regression(dropout=0.3), tmp_path / "b", seed=5))
    other, _, _ = run(job(Regression(dropout=0.3), tmp_path / "c", seed=2**32 - 1))
    assert first == again != other


@pytest.mark.parametrize(("decay", "end"), [(5, 15), (30, 0), (0.25, None)])
def test_the_start_of_a_decay_is_kept_if_a_longer_training_can_go_on_from_it(
    decay: float, end: int | None
) -> None:
    training = TrainingSettings(schedule="warmup-stable-decay", steps=20, decay_steps=decay)
    assert stable_end(training, [Phase("train", 20, 8, 0.1)]) == end
    assert (TrainStageSettings(training=training).fixed_by(20) is None) == (end is not None)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup-stable-decay"])
def test_learning_rates_follow_their_closed_forms(schedule: Any, floor: float) -> None:
    training = TrainingSettings(
        warmup_steps=4, schedule=schedule, min_lr_ratio=floor, decay_steps=5
    )
    phase = Phase("p", 14, 1, 0.2)
    rates = [learning_rate(training, phase, step) for step in range(14)]
    assert rates[:4] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    form: Callable[[float], float] = {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1 - done,
        "cosine": lambda done: math.cos(math.pi * done / 2) ** 2,
        "warmup-stable-decay": lambda done: 1 - math.sqrt(max(0.0, 2 * done - 1)),
    }[schedule]
    expected = [floor * 0.2 + (1 - floor) * 0.2 * form(n / 10) for n in range(10)]
    assert rates[4:] == pytest.approx(expected)
    assert min(rates) > floor * 0.2
    short = [learning_rate(training, Phase("p", 2, 1, 1.0), step) for step in range(2)]
    assert short == [0.5, 1.0]
    share = TrainingSettings(schedule=schedule, decay_steps=0.25)
    if schedule == "warmup-stable-decay":
        ends = [learning_rate(share, Phase("p", 8, 1, 1.0), step) for step in (6, 7)]
        assert ends == [1.0, pytest.approx(1 - math.sqrt(0.5))]


class Counted(Regression):
    counts = "tokens"

    def flops_per_sample(self, model: nn.Module) -> float:
        return 1e3


def test_a_training_reports_and_stores_what_it_did(tmp_path: Path) -> None:
    """Two steps are logged at a time, and those that are evaluated: steps 3 and 6, and the last."""
    rows: list[dict[str, Any]] = []
    given: dict[str, Any] = {"schedule": "linear", "warmup_steps": 2, "checkpoint_every": 2}
    asked = job(Counted(by_token=True, fail_at=5), tmp_path, (4, 4, 16, 1), **given)
    with pytest.raises(ConnectionError):
        train(asked, Worker(0, CPU))
    given |= {"log_every": 2, "eval_every": 3, "epochs": 2, "steps": None}
    whole = job(Counted(by_token=True), tmp_path / "whole", (4, 4, 16, 1), **given)
    outcome = train(replace(whole, attempt=2), Worker(0, CPU), rows.append)
    assert [row["step"] for row in rows] == [2, 3, 4, 6, 7]
    assert [("eval_mse" in row) for row in rows] == [False, True, False, True, True]
    steps = results.read_table(whole.run_dir, "steps")
    assert list(steps["step"]) == [2, 3, 4, 6, 7]
    assert list(steps["lr"]) == pytest.approx([1e-2, 1e-2, 8e-3, 4e-3, 2e-3])
    assert (set(steps["trial_id"]), set(steps["run_id"])) == ({"fit"}, {"run-1"})
    orders = [[sample_at(16 * s + i, whole.task, 0) for i in range(16)] for s in range(7)]
    tokens = [sum(i % 7 + 1 for i in order) for order in orders]
    spans = [tokens[:2], tokens[2:3], tokens[3:4], tokens[4:6], tokens[6:]]
    rates = steps["tokens_per_s"] / steps["samples_per_s"]
    assert list(rates) == pytest.approx([sum(span) / (16 * len(span)) for span in spans])
    assert outcome["steps"] == 7 == math.ceil(2 * 50 / 16)
    assert outcome["loss_final"] == rows[-1]["loss"]
    assert outcome["eval_mse"] == rows[-1]["eval_mse"]
    assert outcome["parameters"] == 2 * (25 + 5) + 6
    assert outcome["gpu_peak_bytes"] is outcome["gpu_util_mean"] is outcome["energy_j"] is None
    assert outcome["step_time_s"] > 0
    assert 0 < outcome["loader_wait_share"] < 1
    assert outcome["flops_per_s"] == pytest.approx(1e3 * outcome["samples_per_s"])
    assert outcome["mfu"] is None  # a CPU has no published peak
    for folder, attempt in ((asked.run_dir, 1), (whole.run_dir, 2)):
        samples = results.read_table(folder, "gpu_samples")
        assert set(samples["attempt"]) == {attempt}
        assert samples["gpu_uuid"].isna().all()
        assert (samples["rss_bytes"] > 2**26).all()
    assert samples["warmup"].any()  # that ends with the first logged steps


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-6), ("bf16", 0.05), ("fp16", 0.02)])
def test_precisions_train_alike(tmp_path: Path, precision: Any, rel: float) -> None:
    """Also clipped, which fp16 does after its scale is taken out."""
    exact, _, _ = run(job(Regression(), tmp_path / "exact", clip_norm=0.05))
    task, given = Regression(dtype=torch.float32), {"precision": precision, "clip_norm": 0.05}
    found, stored, _ = run(job(task, tmp_path / "low", (4, 4, 16, 1), **given))
    assert found == pytest.approx(exact, rel=rel)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert (found == exact) is False


def test_fp16_skips_a_step_that_overflows_and_resumes_with_its_scale(tmp_path: Path) -> None:
    def fp16(folder: str, **task: Any) -> TrainingJob:
        overflowing = Regression(dtype=torch.float32, nan_at=1, **task)
        return job(overflowing, tmp_path / folder, precision="fp16", checkpoint_every=2)

    def last_scale(asked: TrainingJob) -> float:
        last = CheckpointStore(asked.run_dir, "fit").newest()
        assert last is not None
        return float(last.scaler["scale"])

    whole = fp16("whole")
    expected, trained, outcome = run(whole)
    assert outcome["skipped_steps"] == 1
    assert [math.isnan(loss) for loss in expected] == [False, True] + [False] * 5
    with pytest.raises(ConnectionError):
        run(fp16("cut", fail_at=5))
    resumed = fp16("cut")
    found, stored, outcome = run(resumed)
    assert outcome["skipped_steps"] == 1  # counted before the cut
    assert found[2:] == expected[2:]
    assert_equal(stored, trained)
    assert last_scale(resumed) == last_scale(whole) == 2.0**13


@pytest.mark.parametrize("steps", [7, 40])
def test_fp16_that_overflows_at_every_step_ends(tmp_path: Path, steps: int) -> None:
    class Overflowing(Regression):
        def loss(self, *arguments: Any) -> Loss:
            loss = super().loss(*arguments)
            return Loss(loss.total * torch.nan, loss.weight)

    asked = job(Overflowing(dtype=torch.float32), tmp_path, precision="fp16", steps=steps)
    with pytest.raises(FloatingPointError, match=f"nan at step {min(steps, 10)}"):
        run(asked)
    assert not asked.run_dir.exists(asked.run_dir.model("fit"))


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_precision_the_device_lacks(tmp_path: Path, precision: str) -> None:
    message = rf"training\.precision = {precision}: this cpu device lacks it"
    with pytest.raises(ValueError, match=message):
        run(job(Regression(), tmp_path, precision=precision))


@pytest.mark.parametrize("recompute", ["all", "cheap"])
def test_recomputing_activations_changes_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    plan, calls, real = (4, 4, 16, 1), [], nn.Dropout.forward
    expected, trained, _ = run(job(Regression(dropout=0.3), tmp_path / "plain", plan))

    def forward(self: nn.Dropout, x: Tensor) -> Tensor:
        calls.append(x)
        return real(self, x)

    monkeypatch.setattr(nn.Dropout, "forward", forward)
    given: dict[str, Any] = {"gradient_checkpointing": True, "recompute": recompute}
    found, stored, _ = run(job(Regression(dropout=0.3), tmp_path / "again", plan, **given))
    # forward twice in each micro-batch, once in the evaluation, three times in the first check
    assert len(calls) == 2 * 7 * 4 + 1 + 3
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert_close(stored, trained, 1e-12)  # and the names of the weights stay


class Unnamed(Regression):
    blocks = TrainTask.blocks


def test_settings_without_an_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gradient_checkpointing = true: this task names no"):
        run(job(Unnamed(), tmp_path, gradient_checkpointing=True))
    with pytest.raises(ValueError, match="phase second: 5 samples per step"):
        train(job(TwoPhases(), tmp_path, (4, 1, 24, 6)), Worker(0, CPU, 6))
    with pytest.raises(ValueError, match="no samples"):
        run(job(Regression(samples=0), tmp_path))
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("given", [{}, {"log_every": 3, "checkpoint_every": 4}])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, given: dict[str, int]) -> None:
    """Logged steps are read late: step 3 is when step 4 is saved."""
    asked = job(Regression(nan_at=2), tmp_path, **given)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 3; lower"):
        run(asked)
    assert CheckpointStore(asked.run_dir, "fit").newest() is None


class Normed(Regression):
    def build_model(self) -> nn.Module:
        return nn.Sequential(*super().build_model(), nn.BatchNorm1d(1)).to(self.dtype)


@pytest.mark.parametrize(("plan", "warned"), [((16, 1, 16, 1), False), ((8, 2, 16, 1), True)])
def test_batch_normalization_is_warned_about(
    tmp_path: Path, plan: tuple[int, int, int, int], warned: bool
) -> None:
    said: list[Any] = []
    run(job(Normed(), tmp_path, plan, steps=2), report=said.append)
    texts = [text for text in said if isinstance(text, str)]
    assert [("batch normalization" in text, "micro-batch of 8" in text) for text in texts] == [
        (True, True)
    ] * warned


def test_a_stream_gives_the_steps_that_its_samples_in_order_give(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            points = Points()
            return (points[i] for i in range(len(points)))

    class Streaming(Regression):
        def build_dataset(self) -> Any:
            return Stream()

    expected, trained, _ = run(job(Regression(shuffle=False), tmp_path / "map", (5, 4, 16, 1)))
    given: dict[str, Any] = {"checkpoint_every": 3}
    with pytest.raises(ConnectionError):
        run(job(Streaming(fail_at=5), tmp_path / "stream", (5, 4, 16, 1), **given))
    found, stored, _ = run(job(Streaming(), tmp_path / "stream", (4, 4, 16, 1), **given))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert_close(stored, trained, 1e-12)


def test_the_norm_of_the_gradient_is_logged_before_clipping(tmp_path: Path) -> None:
    norms = []
    for folder, clip in (("plain", None), ("clipped", 0.1)):
        asked = job(Regression(), tmp_path / folder, (4, 4, 16, 1), steps=1, clip_norm=clip)
        run(asked)
        norms += list(results.read_table(asked.run_dir, "steps")["grad_norm"])
    assert norms[0] == norms[1] > 0.1


def _worker(rank: int, folder: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        for number, (task, plan) in enumerate(TWO_WORKERS):
            one = job(task, folder / f"{strategy}{number}", plan, strategy=strategy, **GIVEN)
            train(one, Worker(rank, CPU, 2))
        for optimizer in OPTIMIZERS:
            broken = interrupted(folder, strategy, optimizer, fail_at=4)
            with pytest.raises(ConnectionError):
                train(broken, Worker(rank, CPU, 2))
            for name, failures in (("whole", [None]), ("again", [5, None])):
                for fail_at in failures:
                    again = interrupted(folder / name, strategy, optimizer, fail_at)
                    with suppress(ConnectionError):
                        train(again, Worker(rank, CPU, 2))
        memory = resumed_memory(
            RunDirectory.at(folder / strategy), rank, sharded=strategy == "fsdp"
        )
        (folder / f"{strategy}-memory-{rank}").write_text(str(memory))


LARGE = 8  # layers of 4 MiB each
_SIZE = LARGE * 4 * 2**20


def resumed_memory(run: RunDirectory, rank: int, *, sharded: bool) -> int:
    """Return the host memory that a worker takes at most to resume a large model."""
    worker, store = Worker(rank, CPU, 2), CheckpointStore(run, "large")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LARGE)))
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = build()
    model(torch.randn(2, 1024)).sum().backward()
    optimizer.step()
    contents = gathered(model, optimizer, worker)
    if rank == 0:
        store.save(Checkpoint(1, *contents, {}))
    dist.barrier()
    del model, optimizer, contents
    model, optimizer = build()
    forget_peaks(CPU)
    before = psutil.Process().memory_info().rss
    found = store.newest() if rank == 0 else None
    stored = (found.model, found.optimizer) if found else ({}, {})
    load_state(model, optimizer, *stored, worker)
    return host_peak_bytes() - before


def interrupted(folder: Path, strategy: str, optimizer: str, fail_at: int | None) -> TrainingJob:
    task = TwoHeads(by_token=True, fail_at=fail_at)
    place, given = folder / f"{strategy}-{optimizer}", {"optimizer": optimizer, **GIVEN}
    if optimizer == "fp16":  # its scale is exact, and double precision is not cast
        given |= {"optimizer": "adamw", "precision": "fp16"}
    return job(task, place, (4, 2, 16, 2), strategy=strategy, checkpoint_every=3, **given)


OPTIMIZERS = ["adamw", "adafactor", "fp16"]
GIVEN: dict[str, Any] = {"clip_norm": 0.5, "weight_decay": 0.1}
TWO_WORKERS: list[tuple[TrainTask, tuple[int, int, int, int]]] = [
    (TwoHeads(by_token=True), (2, 4, 16, 2)),  # then shares of 3 and 2
    (TwoHeads(by_token=True), (1, 8, 16, 2)),  # then an empty run
]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two workers trained."""
    folder = tmp_path_factory.mktemp("together")
    in_group(_worker, 2, folder)
    return folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_workers_take_the_steps_of_the_one_big_batch(together: Path, strategy: str) -> None:
    for number, (task, plan) in enumerate(TWO_WORKERS):
        done = job(task, together / f"{strategy}{number}", plan, **GIVEN)
        expected, trained = by_hand(done)
        torch.testing.assert_close(losses(done), expected, rtol=1e-10, atol=0)
        assert_close(weights(done), trained, 1e-10)
        assert done.run_dir.list(done.run_dir.table("steps")) == ["fit.parquet"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_workers_resume_to_the_last_digit(
    together: Path, strategy: str, optimizer: str
) -> None:
    whole = interrupted(together / "whole", strategy, optimizer, fail_at=None)
    again = interrupted(together / "again", strategy, optimizer, fail_at=None)
    assert losses(again) == losses(whole)
    assert_equal(weights(again), weights(whole))


@pytest.mark.parametrize(
    ("strategy", "most"),
    [
        ("ddp", 3.5),  # the state of AdamW is twice as large as the weights, which come once more
        ("fsdp", 2.0),  # half of it
    ],
)
def test_a_worker_that_resumes_holds_only_its_part(
    together: Path, strategy: str, most: float
) -> None:
    """Rank 1, in sizes of the weights; every worker held the whole checkpoint several times."""
    assert int((together / f"{strategy}-memory-1").read_text()) < most * _SIZE


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_worker_continues_what_two_began(together: Path, strategy: str, optimizer: str) -> None:
    """A checkpoint holds the whole state, however it was spread."""
    resumed = interrupted(together, strategy, optimizer, fail_at=None)
    expected, trained = by_hand(resumed)
    train(resumed, Worker(0, CPU))
    torch.testing.assert_close(losses(resumed), expected, rtol=1e-10, atol=0)
    assert_close(weights(resumed), trained, 1e-10)
