"""Tables of language-model pretraining, and the report's sentence on the gain over n-grams."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from experiments.common.evaluation import gain_sentence
from experiments.common.tables import columns
from raypipe import Table, parts, plots

#: rows of the table ``measures``: the model, in two ways, the n-grams, and both mixed
MODEL, SLIDING = "language model", "sliding window"
NGRAMS, MIXTURE = "kneser-ney tokens", "language model + kneser-ney"
MODELS = (MODEL, SLIDING)

STEP_METRICS = columns(
    eval_loss="real lower [nats per token]: Mean cross-entropy of the held-out tokens.",
)
MEASURES = Table(
    "measures",
    "a method on the held-out text",
    columns(
        method="text: `language model`, sample by sample; `sliding window`, the same model with "
        "half of its context or more before each token; `language model + kneser-ney`, the sliding "
        "window interpolated with n-grams of tokens; or a baseline: `unigram`, `kneser-ney` "
        "(n-grams of bytes), `kneser-ney tokens` or `xz`.",
        tokens="integer: Number of held-out tokens that are predicted.",
        loss="real lower [nats per token]: Mean cross-entropy of the held-out tokens.",
        perplexity="real lower: Exponential of the loss.",
        bits_per_byte="real lower [bits per byte]: Loss relative to the size of the held-out text, "
        "which compares tokenizers.",
        weight="real: Weight of the language model in the method's probabilities.",
    ),
    axes=("method",),
    baselines=("unigram", "kneser-ney", NGRAMS, "xz"),
    # it contains a baseline: the model is judged without it
    references=(MIXTURE,),
)
GAINS = Table(
    "gains",
    "a method compared with n-grams of the same held-out tokens",
    columns(
        method="text: The method, as in `measures`.",
        baseline="text: `kneser-ney tokens`.",
        tokens="integer: Number of held-out tokens that both predict.",
        groups="integer: Number of groups of about 1,024 successive tokens.",
        gain="real [bits per byte]: How much lower the loss of the method is than that of the "
        "baseline.",
        gain_low="real [bits per byte]: Lower end of the gain's 95 % interval over groups, for "
        "this trained model.",
        gain_high="real [bits per byte]: Upper end of the interval.",
    ),
    axes=("method",),
)
SAMPLES = Table(
    "samples",
    "a text that the trained model wrote",
    columns(
        prompt="text: Text that the model continued.",
        tokens="integer: Maximum number of tokens.",
        temperature="real: Temperature of the draws; 0 is greedy.",
        top_k="integer: Number of most probable tokens drawn from; empty for all.",
        seed="integer: Seed of the draws.",
        text="text: Continuation of the prompt.",
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
