"""Tables of summarization, and the report's sentence on the gain over the best baseline."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from experiments.common.evaluation import gain_sentence
from experiments.common.tables import columns
from raypipe import Table, parts, plots

MODEL = "summarizer"
LEAD = "lead sentence"
#: number of sentences of each baseline
LEADS = {LEAD: 1, "lead three sentences": 3}
CENTRAL = {"central sentence": 1, "central three sentences": 3}
BASELINES = (*LEADS, *CENTRAL)
#: columns of the ROUGE measures, with their titles
ROUGE = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L"}

STEP_METRICS = columns(
    eval_loss="real lower [nats per token]: Mean cross-entropy of the validation summaries, with "
    "label smoothing.",
    eval_cross_entropy="real lower [nats per token]: Mean cross-entropy of the validation "
    "summaries without label smoothing; only where `label_smoothing` is above 0.",
)


def _of_each_rouge(**declared: str) -> dict[str, str]:
    """Return columns for each ROUGE measure: in names ``rouge`` is its name, in texts ``{}``."""
    return {
        name.replace("rouge", measure): text.format(title)
        for measure, title in ROUGE.items()
        for name, text in declared.items()
    }


_INTERVAL = {
    "rouge_gain_low": "real: Lower end of the gain's 95 % bootstrap interval.",
    "rouge_gain_high": "real: Upper end of the gain's 95 % bootstrap interval.",
}
MEASURES = Table(
    "measures",
    "a method on the held-out documents",
    columns(
        method="text: `summarizer` (the trained model), or a baseline.",
        documents="integer: Number of held-out documents.",
        **_of_each_rouge(
            rouge="real higher: Mean F1 of {}; with several references, of the best one."
        ),
        words="real [words]: Mean length of a summary.",
        **_of_each_rouge(rouge_gain="real: Mean gain of {} over the lead sentence.", **_INTERVAL),
    ),
    axes=("method",),
    baselines=BASELINES,
)
GAINS = Table(
    "gains",
    "the summarizer compared with a baseline, document by document",
    columns(
        baseline="text: The baseline.",
        documents="integer: Number of held-out documents.",
        **_of_each_rouge(
            rouge_gain="real: Mean gain of the summarizer's {} over the baseline.", **_INTERVAL
        ),
    ),
    axes=("baseline",),
)
SUMMARIES = Table(
    "summaries",
    "a held-out document, of the first 50",
    columns(
        number="integer: Position of the document, from 0.",
        document="text: Text of the document.",
        references="text: Reference summaries, as a JSON list.",
        summarizer="text: Summary that the trained model wrote.",
        lead_sentence="text: First sentence of the document.",
        **_of_each_rouge(rouge="real: F1 of {} of the model's summary."),
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
