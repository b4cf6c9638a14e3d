"""Tables of summarization, and the report's sentence on the gain over the best baseline."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from experiments.common.evaluation import gain_sentence
from raypipe import Column, Table, parts, plots

MODEL = "summarizer"
LEAD = "lead sentence"
#: number of sentences of each baseline
LEADS = {LEAD: 1, "lead three sentences": 3}
CENTRAL = {"central sentence": 1, "central three sentences": 3}
BASELINES = (*LEADS, *CENTRAL)
#: columns of the ROUGE measures, with their titles
ROUGE = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L"}

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
        for name, title in ROUGE.items()
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
            for name, title in ROUGE.items()
        ),
        Column("words", "real", "Mean length of a summary.", "words"),
        *_gain_columns("Mean gain of {} over the lead sentence."),
    ),
    axes=("method",),
    baselines=BASELINES,
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
            for name, title in ROUGE.items()
        ),
    ),
)
TABLES = (MEASURES, GAINS, SUMMARIES)


def sections(tables: Mapping[str, pd.DataFrame]) -> list[parts.Section]:
    """Return the gain over the strongest baseline, with its interval, for the first screen."""
    compared = plots.rows(tables, "gains")
    if compared is None:
        return []
    row = min(compared.to_dict("records"), key=lambda row: float(row["rouge_2_gain"]))
    data, metric = f"{int(row['documents'])} held-out documents", "the summarizer's ROUGE-2"
    best = f"the {row['baseline']}, the best baseline"
    sentence = gain_sentence(row, "rouge_2_gain", data, metric, best, "higher")
    return [parts.Section("Gain", [], certainty=[sentence])]
