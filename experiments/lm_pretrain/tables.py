"""Tables of language-model pretraining, and the report's sentence on the gain over n-grams."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from experiments.common.evaluation import gain_sentence
from raypipe import Column, Table, parts, plots

#: rows of the table ``measures``: the model, in two ways, the n-grams, and both mixed
MODEL, SLIDING = "language model", "sliding window"
NGRAMS, MIXTURE = "kneser-ney tokens", "language model + kneser-ney"
MODELS = (MODEL, SLIDING)

STEP_METRICS = (
    Column(
        "eval_loss",
        "real",
        "Mean cross-entropy of the held-out tokens.",
        "nats per token",
        "lower",
    ),
)
MEASURES = Table(
    "measures",
    "a method on the held-out text",
    (
        Column(
            "method",
            "text",
            "`language model`, sample by sample; `sliding window`, the same model with half of its "
            "context or more before each token; `language model + kneser-ney`, the sliding window "
            "interpolated with n-grams of tokens; or a baseline: `unigram`, `kneser-ney` (n-grams "
            "of bytes), `kneser-ney tokens` or `xz`.",
        ),
        Column("tokens", "integer", "Number of held-out tokens that are predicted."),
        Column(
            "loss", "real", "Mean cross-entropy of the held-out tokens.", "nats per token", "lower"
        ),
        Column("perplexity", "real", "Exponential of the loss.", better="lower"),
        Column(
            "bits_per_byte",
            "real",
            "Loss relative to the size of the held-out text, which compares tokenizers.",
            "bits per byte",
            "lower",
        ),
        Column("weight", "real", "Weight of the language model in the method's probabilities."),
    ),
    axes=("method",),
    baselines=("unigram", "kneser-ney", NGRAMS, "xz"),
    # it contains a baseline: the model is judged without it
    references=(MIXTURE,),
)
GAINS = Table(
    "gains",
    "a method compared with n-grams of the same held-out tokens",
    (
        Column("method", "text", "The method, as in `measures`."),
        Column("baseline", "text", "`kneser-ney tokens`."),
        Column("tokens", "integer", "Number of held-out tokens that both predict."),
        Column("groups", "integer", "Number of groups of about 1,024 successive tokens."),
        Column(
            "gain",
            "real",
            "How much lower the loss of the method is than that of the baseline.",
            "bits per byte",
        ),
        Column(
            "gain_low",
            "real",
            "Lower end of the gain's 95 % interval over groups, for this trained model.",
            "bits per byte",
        ),
        Column("gain_high", "real", "Upper end of the interval.", "bits per byte"),
    ),
    axes=("method",),
)
SAMPLES = Table(
    "samples",
    "a text that the trained model wrote",
    (
        Column("prompt", "text", "Text that the model continued."),
        Column("tokens", "integer", "Maximum number of tokens."),
        Column("temperature", "real", "Temperature of the draws; 0 is greedy."),
        Column("top_k", "integer", "Number of most probable tokens drawn from; empty for all."),
        Column("seed", "integer", "Seed of the draws."),
        Column("text", "text", "Continuation of the prompt."),
    ),
)
TABLES = (MEASURES, GAINS, SAMPLES)


def sections(tables: Mapping[str, pd.DataFrame]) -> list[parts.Section]:
    """Return the model's gain over n-grams, with its interval, for the first screen."""
    gains = plots.rows(tables, "gains")
    if gains is None:
        return []
    own = gains[gains["method"].isin(MODELS) & np.isfinite(gains["gain_low"].astype(float))]
    if own.empty:
        return []
    row = max(own.to_dict("records"), key=lambda row: float(row["gain"]))
    data = f"{int(row['tokens'])} held-out tokens"
    metric = "the language model's loss in bits per byte"
    sentence = gain_sentence(row, "gain", data, metric, str(row["baseline"]), "lower")
    return [parts.Section("Gain", [], certainty=[sentence])]
