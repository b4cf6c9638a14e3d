"""Declarations of the tables that TELEClass writes."""

from __future__ import annotations

from raypipe import Column, Table

TABLES = (
    Table(
        "measures",
        "a method of a phase, over all classes or those of one level",
        (
            Column("phase", "text", "The stage that measured it."),
            Column(
                "method",
                "text",
                "pseudo_labels, refined (the same of documents to predict), classifier, a "
                "baseline, or supervised.",
            ),
            Column("documents_of", "text", "The documents: train or test."),
            Column("level", "text", "Level of the classes in the taxonomy, or all."),
            Column("documents", "integer", "Documents with a gold label at the level."),
            Column("classes", "integer", "Classes at the level."),
            Column("example_f1", "real", "Mean F1 of a document's label set.", better="higher"),
            Column(
                "precision_at_1",
                "real",
                "Fraction of documents whose first label is gold.",
                better="higher",
            ),
            Column(
                "precision_at_3",
                "real",
                "Fraction of gold labels among the first three.",
                better="higher",
            ),
            Column("mrr", "real", "Mean reciprocal rank of the gold labels.", better="higher"),
            Column("micro_f1", "real", "F1 over all pairs of document and class.", better="higher"),
            Column("macro_f1", "real", "Mean F1 over the classes that occur.", better="higher"),
            Column("labels_mean", "real", "Predicted labels per document."),
            Column("gold_mean", "real", "Gold labels per document."),
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
        (
            Column("id", "text", "Id of the document."),
            Column("labels", "texts", "Ids of the predicted classes, ancestors included."),
            Column("most_probable", "texts", "Ids of the `infer.scores` most probable classes."),
            Column("probabilities", "reals", "Probabilities of `most_probable`."),
        ),
        optional=True,  # infer writes the file, which is as large as the corpus
    ),
    Table(
        "classes",
        "a class of the taxonomy",
        (
            Column("class", "text", "Id of the class."),
            Column("name", "text", "Name of the class."),
            Column("level", "integer", "Level in the taxonomy, 1 for roots."),
            Column("documents", "integer", "Documents by pseudo-labels, ancestors included."),
            Column("generated", "integer", "Generated documents."),
            Column("gold", "integer", "Documents by gold labels, ancestors included."),
        ),
    ),
    Table(
        "generated",
        "a generated document",
        (
            Column("class_index", "integer", "Index of the class in the taxonomy."),
            Column("class", "text", "Id of the class."),
            Column("name", "text", "Name of the class."),
            Column("number", "integer", "Number of the document within its class."),
            Column("text", "text", "The text."),
        ),
    ),
)

STEP_METRICS = (
    Column(
        "eval_loss",
        "real",
        "Mean binary cross-entropy of held-out documents against their pseudo-labels.",
        "nats",
        better="lower",
    ),
    Column(
        "eval_pseudo_label_f1",
        "real",
        "Mean F1 of label sets against the pseudo-labels of held-out documents, which are not gold "
        "labels: the table `measures` has the F1 against those.",
        better="higher",
    ),
)
