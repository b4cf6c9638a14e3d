"""Declarations of the tables that the transformer trainer writes."""

from __future__ import annotations

from raypipe import Column, Table

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
        (
            Column("method", "text", "The transformer, one of its branches, or a baseline."),
            Column("rows", "integer", "Held-out rows."),
            Column("accuracy", "real", "Fraction of rows with the right class.", better="higher"),
            Column("accuracy_low", "real", "Lower end of its 95 % interval (Wilson)."),
            Column("accuracy_high", "real", "Upper end of its 95 % interval (Wilson)."),
            Column(
                "macro_f1",
                "real",
                "Mean F1 over the classes that occur in the rows.",
                better="higher",
            ),
            Column(
                "rmse",
                "real",
                "Root mean squared error, in the unit of the target.",
                better="lower",
            ),
            Column(
                "mae", "real", "Mean absolute error, in the unit of the target.", better="lower"
            ),
            Column("r2", "real", "Coefficient of determination.", better="higher"),
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
        (
            Column("method", "text", "The transformer, or one of its branches."),
            Column("baseline", "text", "The baseline, or a branch of the transformer."),
            Column("rows", "integer", "Held-out rows."),
            Column("only_method_right", "integer", "Rows that only the method has right."),
            Column("only_baseline_right", "integer", "Rows that only the baseline has right."),
            Column("p_value", "real", "Exact test of McNemar, two-sided."),
            Column(
                "p_holm",
                "real",
                "The same, corrected by Holm for the number of baselines, or of branches.",
            ),
        ),
        axes=("method", "baseline"),
    ),
    Table(
        "confusion",
        "a pair of a class and a predicted class",
        (
            Column("gold", "text", "The class of the rows; rare classes count as `others`."),
            Column("predicted", "text", "The class that the transformer predicts for them."),
            Column("rows", "integer", "Held-out rows."),
        ),
        axes=("gold", "predicted"),
    ),
)

STEP_METRICS = (
    Column(
        "eval_loss",
        "real",
        "Mean loss of the validation rows, which are not trained on.",
        better="lower",
    ),
    Column(
        "eval_accuracy",
        "real",
        "Fraction of validation rows with the right class.",
        better="higher",
    ),
    Column(
        "eval_mae",
        "real",
        "Mean absolute error of a regression, in the target's unit.",
        better="lower",
    ),
    Column(
        "eval_mse",
        "real",
        "Mean squared error of a regression, in the target's unit squared.",
        better="lower",
    ),
)
