"""Benchmark the compiled topic model against scikit-learn's: time on one core, and perplexity.

    python -m benchmarks.lda

Both fit the same documents with the same seed and settings and compute the perplexity. They
alternate in this process, on one thread; CPU time is compared. scikit-learn computes the
perplexity once at the end of ``fit`` and again in ``perplexity``, which the published study and
earlier versions of raypipe called: ``ratio`` counts both, ``ratio_fit`` only the first, which has
the same value. There are fewer passes (``max_iter``) than the 60 of a study, and fewer for more
topics, so that scikit-learn ends within minutes. The corpora are the published ones in
``$RAYPIPE_DATA`` (or ``../shared/data``) if present, otherwise the built-in one.

Results: ``benchmarks/results/lda/<corpus>.json``.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from scipy.sparse import csr_matrix
from sklearn.decomposition import LatentDirichletAllocation
from threadpoolctl import threadpool_limits

from benchmarks.rounds import rotated, write_report
from experiments.common.corpora.load import load_corpus
from experiments.pabbo_lda.objective.topic_model import CompiledLatentDirichletAllocation

#: passes over the documents and rounds, by the number of topics
PLAN = {2: (4, 3), 10: (4, 3), 50: (3, 3), 200: (2, 2), 500: (1, 2), 950: (1, 1)}
GOALS = {2: 10.0, 10: 8.0, 50: 5.0, 200: 3.0, 500: 3.0, 950: 3.0}
TOLERANCES = {"float64": 1e-4, "float32": 1e-3}
BATCH_SIZE, SEED = 2048, 42


def measure(kind: type[LatentDirichletAllocation], counts: csr_matrix, T: int, passes: int) -> Any:
    """Return the CPU seconds of fit and of perplexity, and the value."""
    model = kind(
        n_components=T,
        doc_topic_prior=1 / T,
        topic_word_prior=1 / T,
        learning_method="online",
        max_iter=passes,
        batch_size=BATCH_SIZE,
        random_state=SEED,
        n_jobs=1,
    )
    begin = time.process_time()
    model.fit(counts)
    fitted = time.process_time()
    value = model.bound_
    if kind is LatentDirichletAllocation:
        value = model.perplexity(counts)
    return {"fit_s": fitted - begin, "whole_s": time.process_time() - begin, "value": float(value)}


def compare(counts: csr_matrix, T: int) -> dict[str, Any]:
    """Return all rounds of one number of topics, and their ratios."""
    passes, rounds = PLAN[T]
    contenders = {
        "float64": (CompiledLatentDirichletAllocation, counts.astype(np.float64)),
        "float32": (CompiledLatentDirichletAllocation, counts.astype(np.float32)),
        "sklearn": (LatentDirichletAllocation, counts.astype(np.float64)),
    }
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        names = list(contenders)
        for name in rotated(names, number):
            kind, documents = contenders[name]
            rows.append({"round": number, "contender": name} | measure(kind, documents, T, passes))
    reference = {row["round"]: row for row in rows if row["contender"] == "sklearn"}
    found: dict[str, Any] = {"T": T, "max_iter": passes, "goal": GOALS[T], "rounds": rows}
    for name in TOLERANCES:
        mine = [row for row in rows if row["contender"] == name]
        ratios = [reference[row["round"]]["whole_s"] / row["whole_s"] for row in mine]
        fits = [reference[row["round"]]["fit_s"] / row["whole_s"] for row in mine]
        value = mine[0]["value"]
        found[name] = {
            "ratio": median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "ratio_fit": median(fits),
            "whole_s": median(row["whole_s"] for row in mine),
            "relative_difference": abs(value / reference[0]["value"] - 1),
        }
    found["sklearn"] = {"whole_s": median(row["whole_s"] for row in reference.values())}
    return found


def table(results: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the summary to print, a row per number of topics."""
    rows = []
    for row in results:
        ours, single = row["float64"], row["float32"]
        rows.append(
            {
                "T": row["T"],
                "max_iter": row["max_iter"],
                "sklearn s": f"{row['sklearn']['whole_s']:.2f}",
                "ours s": f"{ours['whole_s']:.3f}",
                **{name: f"{ours[name]:.1f}" for name in ("ratio", "lowest", "highest")},
                "of fit": f"{ours['ratio_fit']:.1f}",
                "goal": f"{row['goal']:g}",
                "difference": f"{ours['relative_difference']:.0e}",
                "float32": f"{single['ratio']:.1f}",
                "its difference": f"{single['relative_difference']:.0e}",
            }
        )
    return pd.DataFrame(rows)


def load(name: str) -> tuple[str, csr_matrix]:
    """Return a published corpus if present, otherwise the built-in one."""
    data = Path(os.environ.get("RAYPIPE_DATA", "../shared/data")) / "lda_bow"
    if data.is_dir():
        return name, load_corpus("bow", name, data).counts
    return "stdlib", load_corpus("builtin", "stdlib", None).counts


def main(
    corpus: Annotated[str, typer.Option(help="a corpus of the published study")] = "20news",
    topics: Annotated[list[int] | None, typer.Option(help="numbers of topics; all")] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path(
        "benchmarks/results/lda"
    ),
) -> None:
    """Measure both alternately and write the results."""
    if unknown := [T for T in topics or () if T not in PLAN]:
        raise typer.BadParameter(f"--topics {unknown[0]}: there are {', '.join(map(str, PLAN))}")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    name, counts = load(corpus)
    results = []
    with threadpool_limits(1):
        for T in topics or PLAN:
            results.append(compare(counts, T))
            ours = results[-1]["float64"]
            typer.echo(f"T={T}: {ours['ratio']:.1f} times as fast as scikit-learn")
    report = {
        "corpus": {
            "name": name,
            "documents": counts.shape[0],
            "words": counts.shape[1],
            "entries": int(counts.nnz),
        },
        "batch_size": BATCH_SIZE,
        "topics": results,
    }
    write_report(out / f"{name}.json", started, ("scikit-learn", "numba"), **report)
    typer.echo(f"{name}: perplexity of a fitted topic model, CPU seconds; ratios to scikit-learn")
    typer.echo(table(results).to_string(index=False))
    for row in results:
        for precision, tolerance in TOLERANCES.items():
            if not row[precision]["relative_difference"] <= tolerance:
                typer.echo(f"T={row['T']}, {precision}: differs by more than {tolerance}", err=True)
                raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
