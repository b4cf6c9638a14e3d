"""Record values of the objective on built-in corpora, for ``python -m benchmarks.topics``.

    python -m benchmarks.topics.record

The corpora need no download: the docstrings of Python's standard library and those of the
installed scikit-learn. For each T on a grid that is even in log T, and each of ten LDA seeds, a
topic model is fitted to four fifths of the documents. Its perplexities on these and on the other
documents are recorded.

Results: ``benchmarks/results/topics/recorded.csv.gz``.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from sklearn.model_selection import train_test_split

import raypipe as rp
from experiments.common.corpora.corpus import Corpus
from experiments.common.corpora.docstrings import docstring_records
from experiments.common.corpora.text import Tokenization, vectorize
from experiments.pabbo_lda.objective import LdaFit
from experiments.pabbo_lda.objective.topic_model import fit
from experiments.pabbo_lda.space import Point, Space

RECORDED = Path(__file__).parents[1] / "results" / "topics" / "recorded.csv.gz"
#: packages whose docstrings are a corpus, by name; None is the standard library
PACKAGES = {"stdlib": None, "sklearn": "sklearn"}
SEEDS = range(42, 52)
T_MIN, T_MAX, VALUES = 2, 500, 40
_HOW = LdaFit(max_iter=20, batch_size=512, precision="float32")
#: corpora of the benchmark: a package and a perplexity. That of held-out documents of the standard
#: library is left out: it is smallest at T = 2.
OBJECTIVES = {
    "stdlib": ("stdlib", "perplexity"),
    "sklearn": ("sklearn", "perplexity"),
    "sklearn_heldout": ("sklearn", "heldout_perplexity"),
}


@cache
def corpus(package: str) -> Corpus:
    """Return the docstrings of a package as counts of their 2000 most frequent words."""
    name, root = PACKAGES[package], None
    if name is not None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{name} is not installed")
        root = Path(spec.origin).parent
    texts = (record.text for record in docstring_records(root))
    return vectorize(package, texts, f"docstrings of {package}", Tokenization(max_features=2000))


def perplexities(package: str, T: int, seed: int) -> dict[str, float]:
    """Return the perplexities of one topic model on its own and on other documents."""
    parts = train_test_split(corpus(package).counts, test_size=0.2, random_state=0)
    model = fit(parts[0], Point(T), seed, _HOW)
    held_out = model.perplexity(parts[1].astype(_HOW.precision))
    return {"perplexity": float(model.bound_), "heldout_perplexity": float(held_out)}


def main(
    run_dir: Annotated[Path, typer.Option(help="fits that are there are not repeated")] = Path(
        "runs/topics-recorded"
    ),
) -> None:
    """Fit all topic models, in parallel, and write the table."""
    grid = Space(T_MIN, T_MAX).topics.grid(VALUES).astype(int).tolist()
    arguments = {"package": list(PACKAGES), "T": grid, "seed": list(SEEDS)}
    function = "benchmarks.topics.record:perplexities"
    calls = rp.map(function, arguments, run_dir=run_dir).table("calls")
    parts = [
        calls.loc[calls["package"] == package, ["seed", "T"]].assign(
            dataset=name, perplexity=calls[objective]
        )
        for name, (package, objective) in OBJECTIVES.items()
    ]
    table = pd.concat(parts)[["dataset", "seed", "T", "perplexity"]]
    table = table.sort_values(["dataset", "seed", "T"])
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    compression = {"method": "gzip", "mtime": 0}
    table.to_csv(RECORDED, index=False, float_format="%.8g", compression=compression)


if __name__ == "__main__":
    typer.run(main)
