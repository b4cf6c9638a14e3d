"""Tables of language-model pretraining."""

from __future__ import annotations

from raypipe.storage.tables import Column, Table

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
            "context or more before each token; or a baseline: `unigram`, `kneser-ney` or `xz`.",
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
    ),
    axes=("method",),
    baselines=("unigram", "kneser-ney", "xz"),
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
TABLES = (MEASURES, SAMPLES)
