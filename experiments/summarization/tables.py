"""Tables of summarization."""

from __future__ import annotations

from experiments.summarization import rouge
from raypipe.store.tables import Column, Table

STEP_METRICS = (
    Column(
        "eval_loss",
        "real",
        "Mean cross-entropy of the validation summaries, with label smoothing.",
        "nats per token",
        "lower",
    ),
    Column(
        "eval_cross_entropy",
        "real",
        "Mean cross-entropy of the validation summaries without label smoothing; only where "
        "`label_smoothing` is above 0.",
        "nats per token",
        "lower",
    ),
)


def _gain_columns(meaning: str) -> tuple[Column, ...]:
    """Return the columns of a gain and its interval, for each ROUGE measure."""
    ends = {
        "": meaning,
        "_low": "Lower end of the gain's 95 % bootstrap interval.",
        "_high": "Upper end of the gain's 95 % bootstrap interval.",
    }
    return tuple(
        Column(f"{name}_gain{end}", "real", text.format(title))
        for name, title in rouge.MEASURES.items()
        for end, text in ends.items()
    )


MEASURES = Table(
    "measures",
    "a method on the held-out documents",
    (
        Column("method", "text", "`summarizer` (the trained model), or a baseline."),
        Column("documents", "integer", "Number of held-out documents."),
        *(
            Column(
                name,
                "real",
                f"Mean F1 of {title}; with several references, of the best one.",
                better="higher",
            )
            for name, title in rouge.MEASURES.items()
        ),
        Column("words", "real", "Mean length of a summary.", "words"),
        *_gain_columns("Mean gain of {} over the lead sentence."),
    ),
    axes=("method",),
    baselines=(
        *("lead sentence", "lead three sentences"),
        *("central sentence", "central three sentences"),
    ),
)
GAINS = Table(
    "gains",
    "the summarizer compared with a baseline, document by document",
    (
        Column("baseline", "text", "The baseline."),
        Column("documents", "integer", "Number of held-out documents."),
        *_gain_columns("Mean gain of the summarizer's {} over the baseline."),
    ),
    axes=("baseline",),
)
SUMMARIES = Table(
    "summaries",
    "a held-out document, of the first 50",
    (
        Column("number", "integer", "Position of the document, from 0."),
        Column("document", "text", "Text of the document."),
        Column("references", "text", "Reference summaries, as a JSON list."),
        Column("summarizer", "text", "Summary that the trained model wrote."),
        Column("lead_sentence", "text", "First sentence of the document."),
        *(
            Column(name, "real", f"F1 of {title} of the model's summary.")
            for name, title in rouge.MEASURES.items()
        ),
    ),
)
TABLES = (MEASURES, GAINS, SUMMARIES)
