"""Declarations of the tables that the transformer trainer writes."""

from __future__ import annotations

from experiments.common.tables import columns
from raypipe import Table

#: baselines of texts and of tables, in addition to the majority class and the training mean
LOGISTIC, SVM = "tfidf, logistic regression", "tfidf, linear svm"
RIDGE, BOOSTING, LINEAR = "tfidf, ridge", "gradient boosting", "linear model"
TRANSFORMER = "transformer"
#: the branches of a model with n-grams, each measured without the other
BRANCHES = ("encoder alone", "n-grams alone")
#: what is measured of the trained model
OWN = (TRANSFORMER, *BRANCHES)

TABLES = (
    Table(
        "measures",
        "a method on the held-out rows: the transformer, one of its branches, or a baseline",
        columns(
            method="text: The transformer, one of its branches, or a baseline.",
            rows="integer: Held-out rows.",
            accuracy="real higher: Fraction of rows with the right class.",
            accuracy_low="real: Lower end of its 95 % interval (Wilson).",
            accuracy_high="real: Upper end of its 95 % interval (Wilson).",
            macro_f1="real higher: Mean F1 over the classes that occur in the rows.",
            rmse="real lower: Root mean squared error, in the unit of the target.",
            mae="real lower: Mean absolute error, in the unit of the target.",
            r2="real higher: Coefficient of determination.",
        ),
        axes=("method",),
        baselines=(
            *("majority class", "training mean", LOGISTIC, SVM, RIDGE, BOOSTING, LINEAR),
            *BRANCHES,
        ),
    ),
    Table(
        "comparisons",
        "a comparison of the transformer or a branch with a baseline or a branch",
        columns(
            method="text: The transformer, or one of its branches.",
            baseline="text: The baseline, or a branch of the transformer.",
            rows="integer: Held-out rows.",
            only_method_right="integer: Rows that only the method has right.",
            only_baseline_right="integer: Rows that only the baseline has right.",
            p_value="real: Exact test of McNemar, two-sided.",
            p_holm="real: The same, corrected by Holm for the number of baselines, or of branches.",
        ),
        axes=("method", "baseline"),
    ),
    Table(
        "confusion",
        "a pair of a class and a predicted class",
        columns(
            gold="text: The class of the rows; rare classes count as `others`.",
            predicted="text: The class that the transformer predicts for them.",
            rows="integer: Held-out rows.",
        ),
        axes=("gold", "predicted"),
    ),
)

STEP_METRICS = columns(
    eval_loss="real lower: Mean loss of the validation rows, which are not trained on.",
    eval_accuracy="real higher: Fraction of validation rows with the right class.",
    eval_mae="real lower: Mean absolute error of a regression, in the target's unit.",
    eval_mse="real lower: Mean squared error of a regression, in the target's unit squared.",
)
