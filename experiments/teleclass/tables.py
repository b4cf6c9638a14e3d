"""Declarations of the tables that TELEClass writes."""

from __future__ import annotations

from experiments.common.tables import columns
from raypipe import Table

_CLASS = {"class": "text: Id of the class.", "name": "text: Name of the class."}

TABLES = (
    Table(
        "measures",
        "a method of a phase, over all classes or those of one level",
        columns(
            phase="text: The stage that measured it.",
            method="text: pseudo_labels, refined (the same of documents to predict), classifier, a "
            "baseline, or supervised.",
            documents_of="text: The documents: train or test.",
            level="text: Level of the classes in the taxonomy, or all.",
            documents="integer: Documents with a gold label at the level.",
            classes="integer: Classes at the level.",
            example_f1="real higher: Mean F1 of a document's label set.",
            precision_at_1="real higher: Fraction of documents whose first label is gold.",
            precision_at_3="real higher: Fraction of gold labels among the first three.",
            mrr="real higher: Mean reciprocal rank of the gold labels.",
            micro_f1="real higher: F1 over all pairs of document and class.",
            macro_f1="real higher: Mean F1 over the classes that occur.",
            labels_mean="real: Predicted labels per document.",
            gold_mean="real: Gold labels per document.",
        ),
        axes=("method",),
        groups=("documents_of",),
        baselines=("nearest_name", "nearest_description", "tfidf", "constant"),
        references=("supervised",),
        headline={"level": "all"},
    ),
    Table(
        "predictions",
        "a document with its predicted classes",
        columns(
            id="text: Id of the document.",
            labels="texts: Ids of the predicted classes, ancestors included.",
            most_probable="texts: Ids of the `infer.scores` most probable classes.",
            probabilities="reals: Probabilities of `most_probable`.",
        ),
        optional=True,  # infer writes the file, which is as large as the corpus
    ),
    Table(
        "classes",
        "a class of the taxonomy",
        columns(
            **_CLASS,
            level="integer: Level in the taxonomy, 1 for roots.",
            documents="integer: Documents by pseudo-labels, ancestors included.",
            generated="integer: Generated documents.",
            gold="integer: Documents by gold labels, ancestors included.",
        ),
    ),
    Table(
        "generated",
        "a generated document",
        columns(
            class_index="integer: Index of the class in the taxonomy.",
            **_CLASS,
            number="integer: Number of the document within its class.",
            text="text: The text.",
        ),
    ),
)

STEP_METRICS = columns(
    eval_loss="real lower [nats]: Mean binary cross-entropy of held-out documents against their "
    "pseudo-labels.",
    eval_pseudo_label_f1="real higher: Mean F1 of label sets against the pseudo-labels of held-out "
    "documents, which are not gold labels: the table `measures` has the F1 against those.",
)
