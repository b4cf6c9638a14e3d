"""The first screen quotes the tests that an experiment has made of one trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import pytest

from experiments.lm_pretrain import tables as lm_tables
from experiments.lm_pretrain.tables import sections as lm_sections
from experiments.transformer import tables as transformer_tables
from experiments.transformer.figures import sections as transformer_sections
from raypipe.graph.tables import STAGES
from raypipe.report.page import summary_section
from raypipe.report.parts import Answers, Section
from raypipe.report.results import Declarations, RunResults
from raypipe.store.tables import Table

Tables = Mapping[str, pd.DataFrame]
CONFIGURATION = "train: {training: {steps: 100, seed: 0}}\n"
UNTESTED = [
    ["One run, no interval over seeds."],
    ["Repeat with 6 seeds to find out what is chance, with:"],
]


def _boxes(
    tables: Tables, declared: Sequence[Table], sections: Callable[[Tables], Sequence[Section]]
) -> list[list[str]]:
    """Return the sentences on certainty and on what to do."""
    stages = pd.DataFrame({"run_id": "r", "stage": ["train"], "status": "succeeded",
                           "started_at": pd.Timestamp("2026-03-02", tz="UTC"), "duration_s": 1.0,
                           "device": "cpu"})  # fmt: skip
    declarations = Declarations("Toy.", declared, {"stages": STAGES})
    about = RunResults({"stages": stages, **tables}, "toy", "raypipe run x.yaml", CONFIGURATION,
                  declarations, sections(tables))  # fmt: skip
    (answers,) = summary_section(about).parts
    assert isinstance(answers, Answers)
    *_, certain, advice = ([part for part in parts if isinstance(part, str)]
                           for _, parts in answers.answers)  # fmt: skip
    return [certain, advice]


def _transformer(only_transformer: int, only_svm: int, p_holm: float) -> Tables:
    svm, branch = transformer_tables.SVM, transformer_tables.BRANCHES[0]
    measures = pd.DataFrame({"method": ["transformer", "majority class", svm],
                             "rows": 400, "accuracy": [0.9, 0.5, 0.8]})  # fmt: skip
    comparisons = pd.DataFrame(
        [("transformer", "majority class", 200, 20, 1e-9), ("transformer", branch, 1, 5, 0.2),
         ("transformer", svm, only_transformer, only_svm, p_holm), (branch, svm, 3, 90, 1e-9)],
        columns=["method", "baseline", "only_method_right", "only_baseline_right", "p_holm"],
    ).assign(rows=400)  # fmt: skip
    return {"measures": measures, "comparisons": comparisons}


@pytest.mark.parametrize(
    ("only_transformer", "only_svm", "p_value", "gain", "judged"),
    [
        (52, 12, 0.004, "40 more", "more than chance"),
        (22, 20, 0.9, "2 more", "it may be chance"),
        (12, 52, 0.004, "40 fewer", "more than chance"),
    ],
)
def test_mcnemars_test_says_what_is_chance(only_transformer, only_svm, p_value, gain, judged):
    tables = _transformer(only_transformer, only_svm, p_value)
    certain, advice = _boxes(tables, transformer_tables.TABLES, transformer_sections)
    assert certain == [
        f"Of the 400 held-out rows, the transformer has {gain} right than "
        f"{transformer_tables.SVM}, the best baseline (McNemar's test, p = {p_value}): {judged}."
    ]
    assert advice == ["The tables suggest no next step."]
    untested = {"measures": tables["measures"]}
    assert _boxes(untested, transformer_tables.TABLES, transformer_sections) == UNTESTED


def test_the_interval_of_the_gain_of_a_language_model_says_what_is_chance():
    measures = pd.DataFrame({"method": ["language model", "kneser-ney tokens"],
                             "loss": [3.0, 3.3], "bits_per_byte": [1.5, 1.7]})  # fmt: skip
    gains = pd.DataFrame(
        {"method": ["language model", "language model + kneser-ney"],
         "baseline": "kneser-ney tokens", "tokens": 5000, "groups": 5, "gain": [0.2, 0.4],
         "gain_low": [0.15, 0.3], "gain_high": [0.25, 0.5]}
    )  # fmt: skip
    certain, advice = _boxes(
        {"measures": measures, "gains": gains}, lm_tables.TABLES, lm_sections
    )  # fmt: skip
    assert certain == [
        "Over the 5000 held-out tokens, the language model's loss in bits per byte is 0.2 below "
        "that of kneser-ney tokens (95 % interval of the gain 0.15 to 0.25): more than chance."
    ]
    assert advice == ["The tables suggest no next step."]
    assert _boxes({"measures": measures}, lm_tables.TABLES, lm_sections) == UNTESTED
