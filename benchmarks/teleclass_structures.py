"""Measure TELEClass with one configuration on the corpora of :mod:`benchmarks.taxonomies`.

Each is run by the public command with ``configs/teleclass.yaml``. The methods are compared by
the example-F1 of the documents to predict; intervals of 95 % are over these documents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.preprocessing import normalize

from benchmarks import taxonomies, teleclass_guards
from experiments.teleclass.baselines import tfidf_similarities
from experiments.teleclass.corpus import LabeledCorpus, load
from experiments.teleclass.encoders import embeddings_of
from experiments.teleclass.evaluation import example_f1
from experiments.teleclass.refinement import ClassVectors, label, label_sets, similarities
from experiments.teleclass.settings import TeleclassDataSettings, TeleclassSettings
from experiments.teleclass.taxonomy import Taxonomy
from raypipe.config.yaml_text import load_yaml
from raypipe.stats import half_width
from raypipe.store.artifacts import read_parquet
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table

PROJECT = Path(__file__).resolve().parents[1]
CONFIG = PROJECT / "configs" / "teleclass.yaml"
BASELINES = ("nearest_name", "nearest_description", "tfidf")
Values = NDArray[np.float64]


def measure(
    name: str, corpus: LabeledCorpus, given: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Run one structure in a separate process, and return its row."""
    with TemporaryDirectory(prefix="raypipe-structure-") as folder:
        files, run = Path(folder) / "files", RunDirectory.at(Path(folder) / "run")
        taxonomies.write(corpus, files)
        data = {"source": "files", "dir": str(files), "keywords": "keywords.txt"}
        overrides = [f"data.{key}={value}" for key, value in data.items()] + list(given)
        command = ["run", str(CONFIG), "--local", "--run-dir", run.shown, *overrides]
        clock = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "raypipe", *command],
            cwd=PROJECT,
            env=os.environ | {"RAYPIPE_CACHE": str(Path(folder) / "cache")},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        seconds = time.perf_counter() - clock
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
        own = load(TeleclassDataSettings.model_validate(data))
        vectors = document_vectors(own, run)
        by_document = document_values(own, run, vectors)
        labels = teleclass_guards.label_statistics(own, run, _settings(run), vectors)
    table = taxonomies.sizes(corpus)
    return {"structure": name, **table, "seconds": round(seconds, 1), "warnings": warnings,
            **compared(by_document), "labels": labels}  # fmt: skip


def document_vectors(corpus: LabeledCorpus, run: RunDirectory) -> dict[str, NDArray[np.float32]]:
    """Return the embeddings of the documents to predict, training documents, names and classes."""
    names = {"documents": corpus.predicted} | {n: n for n in ("train", "names", "classes")}
    encode = _settings(run).encode
    blocks = {name: embeddings_of(run, corpus, encode, of).blocks() for name, of in names.items()}
    return {name: np.concatenate([part for _, part in each]) for name, each in blocks.items()}


def _settings(run: RunDirectory) -> TeleclassSettings:
    return TeleclassSettings.model_validate(
        {k: v for k, v in load_yaml(run.read(run.config).decode(), "config").items()
         if k in TeleclassSettings.model_fields}
    )  # fmt: skip


def document_values(
    corpus: LabeledCorpus, run: RunDirectory, vectors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Values]:
    """Return the example-F1 of each document to predict, by method."""
    taxonomy = corpus.taxonomy
    gold = corpus.documents(corpus.predicted).gold
    assert gold is not None
    labels: dict[str, sparse.csr_matrix] = {}
    for method, name in (("nearest_name", "names"), ("nearest_description", "classes")):
        labels[method] = _best(similarities(vectors["documents"], normalize(vectors[name])))
    labels["tfidf"] = _best(np.concatenate([scores for _, scores in tfidf_similarities(corpus)]))
    scores = ClassVectors.read(run).similarities(vectors["documents"])
    best, _ = label(scores, taxonomy, _settings(run).refine)
    labels["refined"] = label_sets(best, len(taxonomy))
    labels["trained"] = _predicted(run, taxonomy)
    found = {method: example_f1(taxonomy.closure(sets), gold) for method, sets in labels.items()}
    measured = read_table(run, "measures")
    whole = measured[(measured["level"] == "all") & (measured["documents_of"] == corpus.predicted)]
    stored = whole.set_index("method")["example_f1"]
    for method, own in found.items():  # the same numbers as the run reports
        expected = stored["classifier" if method == "trained" else method]
        np.testing.assert_allclose(np.nanmean(own), expected, atol=5e-3)
    found["supervised"] = np.array([stored["supervised"]])
    return found


def _best(scores: NDArray[np.float32]) -> sparse.csr_matrix:
    has = np.zeros(scores.shape, bool)
    has[np.arange(len(scores)), scores.argmax(1)] = True
    return sparse.csr_matrix(has)


def _predicted(run: RunDirectory, taxonomy: Taxonomy) -> sparse.csr_matrix:
    table = read_parquet(run, run.partition("predictions"))
    place = {name: c for c, name in enumerate(taxonomy.ids)}
    has = np.zeros((len(table), len(taxonomy)), bool)
    for row, names in enumerate(table.column("labels").to_pylist()):
        has[row, [place[name] for name in names]] = True
    return sparse.csr_matrix(has)


def compared(found: dict[str, Values]) -> dict[str, Any]:
    """Return means with half intervals, and the paired differences of the phases."""
    rows: dict[str, Any] = {}
    for method, values in found.items():
        known = values[~np.isnan(values)]
        rows[method] = [float(known.mean()), _half(known)]
    best = max(BASELINES, key=lambda method: float(np.nanmean(found[method])))
    rows["best_baseline"] = best
    pairs = {
        "refined_minus_baseline": ("refined", best),
        "trained_minus_baseline": ("trained", best),
        "trained_minus_refined": ("trained", "refined"),
    }
    for name, (one, other) in pairs.items():
        difference = found[one] - found[other]
        difference = difference[~np.isnan(difference)]
        rows[name] = [float(difference.mean()), _half(difference)]
    return rows


def _half(values: Values) -> float | None:
    return float(half_width(values.std(ddof=1), len(values))) if len(values) > 1 else None


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the docs."""
    lines = [
        "| structure | classes (with documents) | documents | name | description | TF-IDF "
        "| refined | trained | trained - best baseline | trained - refined | supervised |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        means = [f"{row[method][0]:.3f}" for method in (*BASELINES, "refined", "trained")]
        pairs = (row["trained_minus_baseline"], row["trained_minus_refined"])
        cells = [
            row["structure"].replace("_", " "),
            f"{row['classes']} ({row['occurring']})",
            f"{row['train']:,} + {row['test']:,}",
            *means,
            *(f"{mean:+.3f} ± {half:.3f}" for mean, half in pairs),
            f"{row['supervised'][0]:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measure_all(
    folder: Path, path: Path, names: Sequence[str], given: Sequence[str], limit_s: float
) -> None:
    """Measure the structures that the file does not hold yet, and print the table."""
    drawn = taxonomies.structures(folder)
    if unknown := set(names) - set(drawn):
        raise SystemExit(f"no structure {sorted(unknown)}; there are {', '.join(drawn)}")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in names or drawn:
        if name in {row["structure"] for row in rows}:
            continue
        rows.append(row := measure(name, drawn[name](), given, limit_s))
        print(json.dumps(row), flush=True)
        rows.sort(key=lambda row: list(drawn).index(row["structure"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"given": list(given), "rows": rows}, indent=1) + "\n")
    print(markdown(rows))
    print(f"\n{teleclass_guards.markdown(rows)}")
