"""Benchmark raypipe's training loop against nanoGPT's, at its character-level CPU setting.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.nanogpt --nanogpt nanoGPT --text data/tinyshakespeare/input.txt --threads 1

Both train on 12 sequences of 64 characters per step: 4 layers, 4 heads, width 128, no dropout,
fp32, not compiled, AdamW, clipping, warm-up and cosine schedule. They run in this process with the
same number of threads, log every 10 steps, and neither evaluate nor save during the measured steps.
nanoGPT runs its unchanged ``train.py``. raypipe trains

- ``raypipe``: nanoGPT's model (LayerNorm, learned positions, GELU, tied; same parameter count),
- ``raypipe_config``: the model of configs/lm_shakespeare.yaml (RMSNorm, rotary, SwiGLU, untied).

Each contender trains once per round, in rotating order; its first 10 steps are not counted. The
report gives ratios to nanoGPT in the same round, above 1 if raypipe is faster: of tokens per
second, of the median step time, and of CPU time, which other work on the machine hardly affects.

Results: ``benchmarks/results/nanogpt/threads-<n>.json``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.loops import nanogpt, raypipe_loop
from benchmarks.loops.cases import CLIP_NORM, LOG_EVERY, Case
from benchmarks.loops.measure import Contender, GpuUtilization, run
from benchmarks.training import machine
from experiments.common.blocks import SPLITS
from experiments.lm_pretrain.data import divide
from experiments.lm_pretrain.model import LmSettings
from experiments.lm_pretrain.shards import (
    TOKENIZER,
    Index,
    ShardWriter,
    TokenFolder,
    run_folder,
    shard_name,
)
from experiments.lm_pretrain.tokenizer import make_tokenizer
from experiments.lm_pretrain.training import LanguageModelTask, PackedTokens
from raypipe.provenance import git_commit, package_version
from raypipe.store.run_directory import RunDirectory
from raypipe.training.settings import TrainingSettings

REFERENCE = "nanogpt"
_BATCH = 12


def store_tokens(text: Path, place: Path) -> TokenFolder:
    """Store the characters of a text as shards, with links under nanoGPT's file names."""
    texts = divide([text.read_text(encoding="utf-8")], 0.1, str(text))
    tokenizer = make_tokenizer("characters", texts.train, 0)
    folder = run_folder(RunDirectory.at(place))
    sizes = {}
    for split, documents in zip(SPLITS, texts, strict=True):
        writer = ShardWriter(folder, split, "<u2")
        writer.add(tokenizer.encode(documents[0]))
        writer.close()
        sizes[split] = writer.tokens
    folder.write(TOKENIZER, tokenizer.content.encode())
    index = Index("characters", tokenizer.vocabulary, "<u2", max(sizes.values()), sizes, sizes, {})
    folder.write_index(index)
    for split, name in zip(SPLITS, ("train.bin", "val.bin"), strict=True):
        (place / name).symlink_to(Path(folder.folder) / shard_name(split, 0))
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": tokenizer.vocabulary}))
    return folder


def make_case(name: str, model: LmSettings, folder: TokenFolder, steps: int) -> Case:
    """Return raypipe's training, with the settings of configs/lm_shakespeare.yaml."""
    training = TrainingSettings(
        steps=steps, learning_rate=1e-3, min_lr_ratio=0.1, betas=(0.9, 0.99), weight_decay=0.1,
        warmup_steps=LOG_EVERY, clip_norm=CLIP_NORM, log_every=LOG_EVERY, checkpoint_every=steps,
    )  # fmt: skip
    task = LanguageModelTask(model, PackedTokens(folder, "train", model.context))
    return Case(name, task, _BATCH, 1, steps, training, 0, "tokens", model.context)


def measure(
    contenders: dict[str, tuple[Contender, Case]], rounds: int, threads: int
) -> list[dict[str, Any]]:
    """Return a row per round and contender; ``loss`` is the median of the logged losses."""
    names, cpu = list(contenders), torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            torch.set_num_threads(threads)
            contender, case = contenders[name]
            row, losses = run(contender, case, cpu, LOG_EVERY, GpuUtilization(cpu))
            # nanoGPT logs steps 1, 11, ...; raypipe logs steps 10, 20, ...
            row["loss"] = median(each.loss for each in losses if 5 < each.first < case.steps - 5)
            rows.append({"round": number, "contender": name, **row})
            typer.echo(f"{number} {name}: {row['units_per_s']:.0f} tokens/s")
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of each contender, and its ratios to nanoGPT in the same round."""
    reference = {row["round"]: row for row in rows if row["contender"] == REFERENCE}
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        pairs = [(row, reference[row["round"]]) for row in mine]
        summary[name] = {
            "tokens_per_s": median(row["units_per_s"] for row in mine),
            "step_ms_median": median(row["step_ms_median"] for row in mine),
            "ratio": _spread(row["units_per_s"] / other["units_per_s"] for row, other in pairs),
            "median_step_ratio": _spread(
                other["step_ms_median"] / row["step_ms_median"] for row, other in pairs
            ),
            "cpu_time_ratio": _spread(
                other["cpu_seconds"] / row["cpu_seconds"] for row, other in pairs
            ),
            "loss": median(row["loss"] for row in mine),
        }
    return summary


def main(
    repository: Annotated[
        Path, typer.Option("--nanogpt", help="Directory of nanoGPT's repository.")
    ],
    text: Annotated[Path, typer.Option(help="Text file to train on.")],
    rounds: Annotated[int, typer.Option(min=1, help="Trainings per contender.")] = 31,
    steps: Annotated[int, typer.Option(min=20, help="Steps per training.")] = 40,
    threads: Annotated[
        int | None, typer.Option(help="Threads of PyTorch; its default if not given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path(
        "benchmarks/results/nanogpt"
    ),
) -> None:
    """Measure the loops alternately and write the results."""
    for path in (repository / "train.py", text):
        if not path.is_file():
            raise typer.BadParameter(f"{path}: the file does not exist")
    threads = threads or torch.get_num_threads()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with TemporaryDirectory() as place:
        folder = store_tokens(text, Path(place))
        ours = LmSettings(vocabulary=folder.index().vocabulary)
        parts = {"norm": "layer", "positions": "learned", "mlp": "gelu", "tied": True}
        equal = ours.model_copy(update={**parts, "feed_forward": 4 * ours.width})
        case = make_case("nanogpt", equal, folder, steps)
        script = partial(nanogpt.train, repository.resolve(), Path(place), equal)
        contenders: dict[str, tuple[Contender, Case]] = {
            REFERENCE: (lambda case, _: script(case), case),
            "raypipe": (raypipe_loop.train, case),
            "raypipe_config": (raypipe_loop.train, make_case("config", ours, folder, steps)),
        }
        rows = measure(contenders, rounds, threads)
    summary = summarize(rows)
    report = {
        "started": started,
        "commit": git_commit(),
        "machine": machine(torch.device("cpu"), threads),
        "packages": {name: package_version(name) for name in ("torch", "raypipe-runner")},
        "steps": steps,
        "warmup_steps": LOG_EVERY,
        "training": case.training.model_dump(mode="json"),
        "summary": summary,
        "rounds": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"threads-{threads}.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, entry in summary.items():
        ratios = ", ".join(
            f"{key.replace('_', ' ')} {found['median']:.3f} ({found['low']:.3f} to "
            f"{found['high']:.3f})"
            for key, found in entry.items()
            if key.endswith("ratio")
        )
        typer.echo(
            f"{name}: {entry['tokens_per_s']:,.0f} tokens/s, {entry['step_ms_median']:.1f} ms per "
            f"step, {ratios}, loss {entry['loss']:.3f}"
        )


def _spread(ratios: Iterable[float]) -> dict[str, float]:
    found = sorted(ratios)
    return {
        "median": median(found),
        "lower_quartile": found[len(found) // 4],
        "upper_quartile": found[-1 - len(found) // 4],
        "low": found[0],
        "high": found[-1],
    }


if __name__ == "__main__":
    typer.run(main)
