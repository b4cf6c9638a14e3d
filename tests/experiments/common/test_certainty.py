"""The sentences in which an experiment quotes its own tests of one trained model."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments.lm_pretrain import tables as lm
from experiments.transformer import figures as transformer
from experiments.transformer.tables import BRANCHES, SVM


@pytest.mark.parametrize(
    ("only_transformer", "only_svm", "p_value", "gain", "judged"),
    [
        (52, 12, 0.004, "40 more", "more than chance"),
        (22, 20, 0.9, "2 more", "it may be chance"),
        (12, 52, 0.004, "40 fewer", "more than chance"),
    ],
)
def test_mcnemars_test_says_what_is_chance(only_transformer, only_svm, p_value, gain, judged):
    measures = pd.DataFrame({"method": ["transformer", "majority class", SVM],
                             "rows": 400, "accuracy": [0.9, 0.5, 0.8]})  # fmt: skip
    comparisons = pd.DataFrame(
        [("transformer", "majority class", 200, 20, 1e-9), ("transformer", BRANCHES[0], 1, 5, 0.2),
         ("transformer", SVM, only_transformer, only_svm, p_value),
         (BRANCHES[0], SVM, 3, 90, 1e-9)],
        columns=["method", "baseline", "only_method_right", "only_baseline_right", "p_holm"],
    ).assign(rows=400)  # fmt: skip
    (section,) = transformer.sections({"measures": measures, "comparisons": comparisons})
    assert section.certainty == [
        f"Of the 400 held-out rows, the transformer has {gain} right than {SVM}, the best baseline "
        f"(McNemar's test, p = {p_value}): {judged}."
    ]
    assert not any(each.certainty for each in transformer.sections({"measures": measures}))


def test_the_interval_of_the_gain_of_a_language_model_says_what_is_chance():
    gains = pd.DataFrame(
        {"method": ["language model", "language model + kneser-ney"],
         "baseline": "kneser-ney tokens", "tokens": 5000, "groups": 5, "gain": [0.2, 0.4],
         "gain_low": [0.15, 0.3], "gain_high": [0.25, 0.5]}
    )  # fmt: skip
    (section,) = lm.sections({"gains": gains})
    assert section.certainty == [
        "Over the 5000 held-out tokens, the language model's loss in bits per byte is 0.2 below "
        "that of kneser-ney tokens (95 % interval of the gain 0.15 to 0.25): more than chance."
    ]
    assert lm.sections({}) == []
