"""Benchmark TELEClass at scale: time and memory of refine, by number of documents; 1000 classes.

    python -m benchmarks.teleclass

It runs phase 2 in one process on memory-mapped random vectors, for growing numbers of documents.
``measure_classifier`` measures samples per second and peak memory of forward passes as in phase 6
(infer) and of training steps as in phase 5 (train), in fp32, tf32 and bf16, on a GPU:
`benchmarks.gpu` calls it.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.documents import Documents
from experiments.teleclass.encoders import Embeddings
from experiments.teleclass.model import build_classifier
from experiments.teleclass.refine import run_refine
from experiments.teleclass.settings import ClassifierSettings, EncodeSettings, TeleclassSettings
from experiments.teleclass.taxonomy import Row, Taxonomy, make_taxonomy
from experiments.teleclass.training import Collate, LongestSamples, TeleclassTask
from raypipe.graph.context import Session, StageContext
from raypipe.graph.experiment import Stage
from raypipe.graph.progress import Display
from raypipe.graph.tracking import Trackers
from raypipe.launch.inline import InlineLauncher
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

RESULTS = Path(__file__).parent / "results" / "teleclass"
SIZES = (100_000, 200_000, 500_000, 1_000_000)
CLASSES, DIMENSIONS, NOISE = 1000, 384, 0.15
BERT_BASE = ClassifierSettings(
    length=128, vocabulary=30_522, hidden=768, layers=12, heads=12, dropout=0.1
)


def taxonomy(classes: int) -> Taxonomy:
    """Return a taxonomy of ten roots with up to ten children per class."""
    rows = [Row("benchmark", str(c), f"class {c}") for c in range(classes)]
    edges = [Row("benchmark", str((c - 10) // 10), str(c)) for c in range(10, classes)]
    return make_taxonomy(rows, edges, source="benchmark")


def make_vectors(run: RunDirectory, encoding: EncodeSettings, documents: int) -> None:
    """Write random class vectors and document vectors around them, block by block."""
    draw = np.random.default_rng(0)
    classes = draw.standard_normal((CLASSES, DIMENSIONS)).astype(np.float32)
    classes /= np.linalg.norm(classes, axis=1, keepdims=True)
    for name, rows in (("classes", CLASSES), ("train", documents)):
        store = Embeddings(run, name, rows, encoding.block)
        for number in range(len(store)):
            start, stop = store.bounds(number)
            if name == "classes":
                store.write(number, classes[start:stop])
                continue
            own = classes[draw.integers(0, CLASSES, stop - start)]
            noise = NOISE * draw.standard_normal(own.shape, dtype=np.float32)
            store.write(number, own + noise)


def refine_once(run: RunDirectory, documents: int) -> dict[str, Any]:
    """Run phase 2 in this process; return its time and the process's peak resident memory."""
    ids = pa.array(np.arange(documents)).cast(pa.large_string())
    train = Documents(ids, ids, None, {})
    corpus = LabeledCorpus(taxonomy(CLASSES), train, None)
    display, ledger = Display(), Ledger(run)
    with display, Trackers((), run, "benchmark", "teleclass", {}) as trackers:
        launcher = InlineLauncher()
        session = Session(
            run, "benchmark", ledger, launcher, display, [], trackers, TeleclassSettings()
        )
        stage = Stage("refine", print, reads=("data", "encode", "refine"))
        context = StageContext(stage, session)
        clock, cpu = time.perf_counter(), time.process_time()
        run_refine(corpus, context)
        seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"documents": documents, "seconds": seconds, "cpu_s": cpu, "peak_bytes": peak}


def measure_refine(sizes: list[int]) -> dict[str, Any]:
    """Measure each size in a separate process, with one thread."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with TemporaryDirectory(prefix="raypipe-teleclass-") as folder:
            make_vectors(RunDirectory.at(folder), EncodeSettings(), size)
            command = [sys.executable, "-m", "benchmarks.teleclass", folder, str(size)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    about = {"classes": CLASSES, "dimensions": DIMENSIONS, "machine": platform.processor()}
    return {**about, "rows": rows}


def measure_classifier(batches: list[int], steps: int) -> dict[str, Any]:
    """Return samples per second and peak memory of forward passes and training steps on a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("classifier needs a GPU")
    classes = 531
    rows = []
    for precision in ("fp32", "tf32", "bf16"):
        for batch in batches:
            for training in (False, True):
                row: dict[str, Any] = {"precision": precision, "batch": batch, "training": training}
                try:
                    row |= _speed(precision, batch, steps, classes, training=training)
                except torch.OutOfMemoryError:
                    row |= {"samples_per_s": None, "peak_bytes": None}
                print(row, flush=True)
                rows.append(row)
    return {"device": torch.cuda.get_device_name(), "model": BERT_BASE.model_dump(), "rows": rows}


def _speed(
    precision: str, batch: int, steps: int, classes: int, *, training: bool
) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    model = build_classifier(BERT_BASE, classes, 0).cuda().train(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    data = LongestSamples(BERT_BASE.length, BERT_BASE.vocabulary, classes, 0)
    samples = Collate(classes)([data[i] for i in range(batch)])
    *inputs, targets = (tensor.cuda() for tensor in samples)
    task = TeleclassTask(BERT_BASE, classes, data)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            if not training:
                with torch.inference_mode():
                    model(*inputs).sigmoid().cpu()
                return
            loss = task.loss(model, (*inputs, targets), None)  # type: ignore[arg-type]
        (loss.total / batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    clock = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    rate = batch * steps / (time.perf_counter() - clock)
    return {"samples_per_s": rate, "peak_bytes": torch.cuda.max_memory_allocated()}


def main() -> None:
    """Measure all sizes; with a folder and a size, that one in this process."""
    if len(sys.argv) > 1:
        folder, size = sys.argv[1:]
        torch.set_num_threads(1)
        print(json.dumps(refine_once(RunDirectory.at(folder), int(size))))
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = measure_refine(list(SIZES))
    (RESULTS / "refine.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
