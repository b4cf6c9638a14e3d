"""The hand-written T5 of experiments/summarization against the T5 of ``transformers``.

    python -m benchmarks.t5 [--case small-cpu] [--threads 1]

Both have the same weights and see the same batches of the built-in corpus, padded alike.
``transformers`` runs twice: with ``sdpa`` and with ``eager`` attention; its better one is the
opponent. In each round every contender runs once, in an order that rotates; a first round is not
counted. Seconds are those of the CPU, since other programs may run beside. A ratio is
``transformers`` divided by ours in the same round: above 1, ours is better.

- ``step``: forward with dropout and label smoothing, and backward, summed over batches that are
  spread evenly over the lengths of the corpus;
- ``peak``: the most memory that weights, gradients and activations take in the step with the
  longest samples, counted by PyTorch's profiler at each allocation;
- ``greedy`` and ``beams``: summaries of held-out documents, sorted by length and batched alike,
  with a cache, the same length, length penalty and rule against repetitions. Searches stop by the
  same criterion and give the same tokens. Ours then drops a finished document from its batch;
  ``transformers`` computes it on until the whole batch is finished;
- ``workload``: a training of the epochs of the configuration and summaries of all held-out
  documents with beams, both extrapolated from the above.

Before anything is timed, losses and norms of the gradients have to agree to 1e-4; the tokens of
every search have to be equal. Otherwise the benchmark ends with an error.

The cases: ``small-cpu`` is configs/summarization.yaml with the profile ``cpu``; ``small`` is the
same without a profile, sources of up to 512 tokens; ``t5-small`` has the sizes of T5-small. The
small models are trained for some steps first, so that summaries end at lengths of their own.

Results: ``benchmarks/results/t5/<case>.json``.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

from benchmarks.training import machine
from experiments.summarization.generation import GenerationSettings, generate
from experiments.summarization.model import END, PAD, T5, T5Settings
from experiments.summarization.pairs import load
from experiments.summarization.pretrained import weight_names
from experiments.summarization.settings import DataSettings
from experiments.summarization.stored import Pair, RandomPairs
from experiments.summarization.tokens import Lengths, encode_pairs, make_tokenizer
from experiments.summarization.training import Batch, SummarizationTask, pad, pad_sources
from raypipe.provenance import git_commit, package_version
from raypipe.training.task import Phase, StepContext

OURS, ATTENTIONS = "ours", ("sdpa", "eager")
GOAL, TOLERANCE = 1.3, 1e-4
LABEL_SMOOTHING, EPOCHS = 0.1, 8
CONTEXT = StepContext(0, Phase("train", 1, 8, 1e-3), 0)


@dataclass(frozen=True)
class Case:
    """Sizes of the model and of the work.

    Attributes:
        model: the sizes, with the dropout of the training.
        data: the lengths that documents and summaries are cut at.
        batch: samples per step.
        generation: the search with beams; ``greedy`` differs in the beams alone.
        batches: steps measured per round.
        documents: held-out documents summarized per round; None for all.
        warmup: steps of training before anything is measured.

    """

    model: T5Settings
    data: DataSettings
    batch: int
    generation: GenerationSettings
    batches: int = 8
    documents: int | None = None
    warmup: int = 0


def _search(length: int, batch: int) -> GenerationSettings:
    return GenerationSettings(beams=4, length=length, no_repeat_ngram=3, batch=batch)


CASES = {
    "small-cpu": Case(
        T5Settings(dropout=0.2),
        DataSettings(source_length=128, target_length=32),
        16,
        _search(32, 32),
        warmup=300,
    ),
    "small": Case(T5Settings(), DataSettings(), 8, _search(64, 16), warmup=300),
    "t5-small": Case(
        T5Settings(
            vocabulary=32_128,
            width=512,
            head_width=64,
            heads=8,
            feed_forward=2048,
            layers=6,
            gated=False,
        ),
        DataSettings(),
        4,
        _search(64, 16),
        batches=4,
        documents=16,
    ),
}


class Library(nn.Module):
    """The model of ``transformers``, called as the task calls ours."""

    def __init__(self, ours: T5, attention: str) -> None:
        super().__init__()
        s = ours.settings
        config = T5Config(
            vocab_size=s.vocabulary,
            d_model=s.width,
            d_kv=s.head_width,
            num_heads=s.heads,
            d_ff=s.feed_forward,
            num_layers=s.layers,
            num_decoder_layers=s.decoder_depth,
            feed_forward_proj="gated-gelu" if s.gated else "relu",
            dropout_rate=s.dropout,
            decoder_start_token_id=PAD,
            attn_implementation=attention,
        )
        self.model = T5ForConditionalGeneration(config)
        state, own = {}, ours.state_dict()
        for name, parts in weight_names(s).items():
            state |= dict(zip(parts, own[name].chunk(len(parts)), strict=True))
        for stack in ("encoder", "decoder"):
            state[f"{stack}.embed_tokens.weight"] = own["embedding.weight"]
        state["lm_head.weight"] = own["embedding.weight"]
        self.model.load_state_dict(state)
        if self.model.config._attn_implementation != attention:
            raise RuntimeError(f"this version of transformers has no {attention} attention for T5")

    def forward(self, inputs: Tensor, mask: Tensor, decoder_inputs: Tensor) -> Tensor:
        """Logits ``[B, T, V]``."""
        logits: Tensor = self.model(
            input_ids=inputs,
            attention_mask=mask,
            decoder_input_ids=decoder_inputs,
            use_cache=False,
        ).logits
        return logits

    def generate(
        self, inputs: Tensor, mask: Tensor, settings: GenerationSettings
    ) -> list[list[int]]:
        """As :func:`experiments.summarization.generation.generate`, searched by the library."""
        how = GenerationConfig(
            num_beams=settings.beams,
            max_new_tokens=settings.length,
            length_penalty=settings.length_penalty if settings.beams > 1 else None,
            early_stopping=False if settings.beams > 1 else None,
            no_repeat_ngram_size=settings.no_repeat_ngram,
            do_sample=False,
            use_cache=True,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=END,
        )
        summaries: list[list[int]] = [[] for _ in inputs]
        order = mask.sum(1).argsort(descending=True, stable=True)
        for rows in order.split(settings.batch):
            length = int(mask[rows].sum(1).max())
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            # the beams of a document share its keys and values: the library would copy them anew
            # in every step, which takes up to three quarters of the time
            cache.reorder_cache = cache.self_attention_cache.reorder_cache
            found = self.model.generate(
                input_ids=inputs[rows, :length],
                attention_mask=mask[rows, :length].long(),
                generation_config=how,
                past_key_values=cache,
            )
            for row, text in zip(rows.tolist(), found.tolist(), strict=True):
                summaries[row] = [token for token in text if token not in (PAD, END)]
        return summaries


def samples(case: Case) -> tuple[list[Pair], list[Tensor]]:
    """Training pairs, the longest first, and held-out sources."""
    data = load(case.data)
    texts = [*data.train.documents, *(text for each in data.train.summaries for text in each)]
    tokenizer = make_tokenizer(texts, T5Settings().vocabulary, None)
    lengths = Lengths(case.data.source_length, case.data.target_length)
    train, held_out = (
        encode_pairs(tokenizer, "", lengths, part.documents, part.summaries)
        for part in (data.train, data.held_out)
    )
    pairs = [
        (torch.tensor(source), torch.tensor(target))
        for source, target in zip(*train.pairs.to_pydict().values(), strict=True)
    ]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]), reverse=True)
    return pairs, [torch.tensor(source) for source in held_out.documents["source"].to_pylist()]


def spread(pairs: Sequence[Pair], case: Case) -> list[Batch]:
    """Batches of like lengths, the first with the longest samples."""
    starts = np.linspace(0, len(pairs) - case.batch, case.batches).round().astype(int).tolist()
    return [pad(pairs[start : start + case.batch]) for start in starts]


def step(task: SummarizationTask, model: nn.Module, batch: Batch) -> float:
    """Forward and backward; the loss. Gradients of the step before are dropped first."""
    model.zero_grad(set_to_none=True)
    loss = task.loss(model, batch, CONTEXT)
    loss.total.backward()
    return loss.total.item()


def difference(task: SummarizationTask, models: dict[str, nn.Module], batch: Batch) -> float:
    """The largest relative difference of loss and norm of the gradients, without dropout."""
    found = {}
    for name, model in models.items():
        loss = step(task, model.eval(), batch)
        norm = nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        found[name] = torch.tensor([loss, norm.item()], dtype=torch.float64)
    ours = found[OURS]
    return max(((each - ours).abs() / ours).max().item() for each in found.values())


def warm_up(task: SummarizationTask, model: T5, pairs: Sequence[Pair], case: Case) -> None:
    """Some steps of training, so that the model ends its texts."""
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.03)
    draw = np.random.default_rng(0)
    for _ in range(case.warmup):
        start = int(draw.integers(0, len(pairs) - case.batch))
        step(task, model.train(), pad(pairs[start : start + case.batch]))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def peak_bytes(task: SummarizationTask, model: nn.Module, batch: Batch) -> int:
    """Bytes of weights, gradients and activations at the peak of a step."""
    model.train().zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = task.loss(model, batch, CONTEXT)
        loss.total.backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return weights + int(np.cumsum([change for _, change in changes]).max())


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def summarize(
    seconds: dict[str, dict[str, list[float]]], peaks: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Ratios of the better of the library's attentions to ours, of each measure."""
    summary: dict[str, dict[str, Any]] = {}
    for measure, rounds in seconds.items():
        best = min(ATTENTIONS, key=lambda name: float(np.median(rounds[name])))
        ratios = [a / b for a, b in zip(rounds[best], rounds[OURS], strict=True)]
        medians = {f"{name}_s": float(np.median(rounds[name])) for name in rounds}
        summary[measure] = {"best_attention": best, "ratio": quartiles(ratios), **medians}
    best = min(ATTENTIONS, key=lambda name: peaks[name])
    ratio = peaks[best] / peaks[OURS]
    summary["peak"] = {"best_attention": best, "ratio": quartiles([ratio])}
    summary["peak"] |= {f"{name}_bytes": peak for name, peak in peaks.items()}
    for measured in summary.values():
        measured["reaches_goal"] = measured["ratio"]["median"] >= GOAL
    return summary


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """All measures of a case. Raises RuntimeError: the contenders do not compute the same."""
    pairs, sources = samples(case)
    held_out = len(sources)
    sources = sources[: case.documents]
    inputs, mask = pad_sources(sources)
    torch.manual_seed(0)
    ours = T5(case.model)
    unused = RandomPairs(case.model.vocabulary, 8, 8, 1)
    task = SummarizationTask(case.model, unused, label_smoothing=LABEL_SMOOTHING)
    warm_up(task, ours, pairs, case)
    libraries = {name: Library(ours, name) for name in ATTENTIONS}
    models: dict[str, nn.Module] = {OURS: ours, **libraries}
    batches = spread(pairs, case)
    worst = max(difference(task, models, batch) for batch in batches)
    if not worst <= TOLERANCE:
        raise RuntimeError(f"loss or gradients differ by {worst:.1e}")

    def steps(name: str) -> None:
        for batch in batches:
            step(task, models[name].train(), batch)

    def searched(beams: int) -> Callable[[str], None]:
        how = case.generation.model_copy(update={"beams": beams})

        def search(name: str) -> None:
            models[name].eval()
            texts = (
                generate(ours, inputs, mask, how)
                if name == OURS
                else libraries[name].generate(inputs, mask, how)
            )
            if texts != written.setdefault(beams, texts):
                raise RuntimeError(f"{name} writes other tokens with {beams} beams")

        return search

    written: dict[int, list[list[int]]] = {}
    works = {"step": steps, "greedy": searched(1), "beams": searched(case.generation.beams)}
    seconds: dict[str, dict[str, list[float]]] = {
        work: {name: [] for name in models} for work in (*works, "workload")
    }
    number = -(-len(pairs) // case.batch) * EPOCHS  # steps of a training
    for count in range(-1, rounds):
        names = [*models][count % len(models) :] + [*models][: count % len(models)]
        for work, function in works.items():
            for name in names:
                begin = time.process_time()
                function(name)
                if count >= 0:
                    seconds[work][name].append(time.process_time() - begin)
        if count >= 0:
            for name in names:
                trained = seconds["step"][name][-1] / len(batches) * number
                evaluated = seconds["beams"][name][-1] / len(sources) * held_out
                seconds["workload"][name].append(trained + evaluated)
            last = {work: seconds[work]["sdpa"][-1] / seconds[work][OURS][-1] for work in seconds}
            typer.echo(f"{count} sdpa / ours: {', '.join(f'{k} {v:.2f}' for k, v in last.items())}")
    peaks = {name: peak_bytes(task, model, batches[0]) for name, model in models.items()}
    return {
        "largest_difference": worst,
        "steps_per_round": len(batches),
        "documents_per_round": len(sources),
        "workload": {"steps": number, "documents": held_out},
        "tokens_written": {
            f"{beams} beams": quartiles([len(text) for text in texts])
            for beams, texts in written.items()
        },
        "summary": summarize(seconds, peaks),
        "seconds": seconds,
    }


def table(name: str, summary: dict[str, dict[str, Any]]) -> Table:
    """The summary as it is printed at the end."""
    shown = Table(title=f"{name}: ratios of transformers to ours", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "ours", "transformers", "attention", "ratio", "quartiles"):
        shown.add_column(column, justify="right")
    for what, entry in summary.items():
        key, unit, scale = ("bytes", "MiB", 2**20) if what == "peak" else ("s", "s", 1)
        best, ratio = entry["best_attention"], entry["ratio"]
        values = (f"{entry[f'{each}_{key}'] / scale:.1f} {unit}" for each in (OURS, best))
        spans = f"{ratio['lower_quartile']:.2f}-{ratio['upper_quartile']:.2f}"
        shown.add_row(what, *values, best, f"{ratio['median']:.2f}", spans)
    return shown


def main(
    case: Annotated[list[str] | None, typer.Option(help=", ".join(CASES))] = None,
    rounds: Annotated[int, typer.Option(min=1, help="how often each contender runs")] = 7,
    threads: Annotated[int, typer.Option(help="of PyTorch")] = 1,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path(
        "benchmarks/results/t5"
    ),
) -> None:
    """Measure the contenders in turn and write the results."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    for name in case or CASES:
        if name not in CASES:
            raise typer.BadParameter(f"--case {name}: allowed are {', '.join(CASES)}")
        what = CASES[name]
        started = datetime.now(UTC).isoformat(timespec="seconds")
        found = measure(what, rounds)
        report = {
            "case": name,
            "started": started,
            "commit": git_commit(),
            "machine": machine(torch.device("cpu"), threads),
            "packages": {each: package_version(each) for each in ("torch", "transformers")},
            "model": what.model.model_dump(mode="json"),
            "source_length": what.data.source_length,
            "target_length": what.data.target_length,
            "micro_batch": what.batch,
            "label_smoothing": LABEL_SMOOTHING,
            "generation": what.generation.model_dump(mode="json"),
            "warmup_steps": what.warmup,
            "goal": GOAL,
            **found,
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        Console().print(table(name, found["summary"]))


if __name__ == "__main__":
    typer.run(main)
