"""Settings of TELEClass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from experiments.common.corpora.files import check_files
from raypipe import Operational, Settings, TrainingSettings, TrainStageSettings

#: precisions of a model that is not trained
Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]
#: sections of the published pipeline (Zhang et al. 2025), by ``refine: published`` and so on
PUBLISHED_REFINE: Mapping[str, Any] = {
    "candidates": "all",
    "top_documents": 20,
    "confidence": "similarity",
    "weights": "equal",
    "anchor": 0.0,
    "center": False,
    "agreement": 1.0,
    "min_labels": 2,
    "max_labels": 5,
}
PUBLISHED_INFER: Mapping[str, Any] = {"threshold": 0.5}


class TeleclassDataSettings(Settings):
    """The taxonomy and the documents: built in, or files in a folder."""

    source: Literal["builtin", "files"] = "builtin"
    """The built-in corpus, or files in `dir`."""
    dir: Path | None = None
    """Folder of the files."""
    labels: str = "labels.txt"
    """File of the classes, `id<TAB>name` per line."""
    hierarchy: str = "label_hierarchy.txt"
    """File of the edges, `parent id<TAB>child id` per line."""
    keywords: str | None = None
    """File of the classes' keywords, `name:term,term` per line."""
    train: str | None = None
    """Documents to learn from (.jsonl, .csv, .parquet, .txt); by default `train.*`."""
    test: str | None = None
    """Documents to predict; by default `test.*`, or the training documents."""
    train_labels: str | None = None
    """Gold labels of the training documents, used for measures only."""
    test_labels: str | None = None
    """Gold labels of the test documents, `id<TAB>label,label` per line."""
    text: tuple[str, ...] = Field(("text",), min_length=1)
    """Columns of the text, joined by newlines."""
    id: str = "id"
    """Column of the documents' ids."""
    gold: str = "labels"
    """Column of the gold labels."""
    max_documents: PositiveInt | None = None
    """Size of a sample of each file; a smaller sample is part of a larger one."""

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _whole(self) -> TeleclassDataSettings:
        check_files(self, ["files"], "dir")
        return self


class StageSettings(Settings):
    """Workers of a phase that runs as tasks."""

    workers: Operational[PositiveInt | None] = None
    """Tasks that run at the same time; by default as many as fit."""
    cpus: Operational[PositiveFloat] = 1
    """CPUs per task, or a fraction of one."""
    gpus: Operational[float | None] = Field(None, ge=0)
    """GPUs per task; by default 1 for a neural model if there is one."""

    @model_validator(mode="after")
    def _whole_above_one(self) -> Self:
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus or 0)):
            if value > 1 and value != int(value):
                raise ValueError(f"{name} = {value}: above 1 it must be a whole number")
        return self


class EncodeSettings(StageSettings):
    """Phase 1: vectors of documents and classes."""

    model: Operational[str | None] = None
    """Sentence-transformers model, by name or directory; by default LSA (TF-IDF and a truncated
    SVD) is fitted to the documents.
    """
    max_tokens: PositiveInt = 256
    """Longest text in tokens; longer ones are cut (sentence-transformers)."""
    batch_size: Operational[PositiveInt] = 64
    """Texts per forward pass (sentence-transformers)."""
    precision: Arithmetic = "fp32"
    """Arithmetic of the model (sentence-transformers)."""
    dimensions: PositiveInt = 256
    """Dimensions of the vectors (LSA)."""
    max_features: PositiveInt = 50_000
    """Size of the vocabulary (LSA)."""
    fit_documents: PositiveInt = 100_000
    """Documents to fit to (LSA)."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the truncated SVD (LSA)."""
    block: PositiveInt = 1024
    """Documents per task, and per stored file."""
    cache: Operational[bool] = True
    """Whether to share vectors between runs through the user's cache."""


class RefineSettings(StageSettings):
    """Phase 2: class vectors from documents, then pseudo-labels; `published` for the paper's."""

    rounds: int = Field(3, ge=0)
    """Most rounds in which class vectors become means of documents."""
    agreement: float = Field(0.99, gt=0, le=1)
    """Share of documents whose most similar class stays the same, from which no further round
    begins.
    """
    candidates: Literal["first_choice", "all"] = "first_choice"
    """Documents that a class may move to: those in which no unrelated class is as similar
    (first_choice), or all.
    """
    top_documents: PositiveInt | None = None
    """Most confident candidates per class; by default all of them."""
    confidence: Literal["similarity", "margin"] = "margin"
    """Confidence of a document in a class: its similarity, or its margin over unrelated classes."""
    weights: Literal["confidence", "equal"] = "confidence"
    """Weights of the documents of a class in its mean."""
    anchor: float = Field(10.0, ge=0)
    """Weight of the description's vector, in documents of mean weight."""
    center: bool = True
    """Whether to subtract the mean of the documents' vectors."""
    given: Operational[str | None] = None
    """File of labels, JSON {document id: [class ids]}; by default labels end at the largest gap."""
    min_labels: PositiveInt = 1
    """Fewest labels per document before ancestors are added."""
    max_labels: PositiveInt = 3
    """Most labels per document before ancestors are added."""

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return the section for ``refine: published``."""
        return PUBLISHED_REFINE if given == "published" else given

    @model_validator(mode="after")
    def _ordered(self) -> RefineSettings:
        if self.min_labels > self.max_labels:
            raise ValueError(
                f"min_labels = {self.min_labels} is above max_labels = {self.max_labels}"
            )
        return self


class AugmentSettings(StageSettings):
    """Phase 3: generated documents for starved classes."""

    starved_below: int = Field(10, ge=0)
    """Number of documents below which a class counts as starved."""
    documents: PositiveInt = 5
    """Documents generated per starved class."""
    max_share: float | None = Field(0.2, gt=0)
    """Most generated documents, as a fraction of the labeled ones: each starved class gets fewer
    then, but at least one; null for no limit, as published.
    """
    source: Literal["generator", "files", "none"] = "generator"
    """Source of the documents: a function, files, or none."""
    generator: str = "experiments.teleclass.generators:from_keywords"
    """Function that writes documents for a class, as module:function."""
    texts: Operational[str] = "generated_docs.txt.gz"
    """File of the documents for source=files, `id<TAB>text` per line."""
    labels: Operational[str] = "generated_doc2label.json.gz"
    """File of their classes for source=files: JSON {id: {"core_classes": class}}."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the generator."""


class ClassifierSettings(Settings):
    """The encoder with a multi-label head: one output per class."""

    pretrained: Operational[str | None] = None
    """BERT-style model, by name or directory; by default an encoder is trained from scratch."""
    length: PositiveInt = 128
    """Longest text in tokens; longer ones are cut."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout rate before the head, and inside a new encoder."""
    vectors: bool = True
    """Whether a new encoder also reads the text's vector of phase 1."""
    vocabulary: int = Field(8000, ge=512)
    """Size of the byte-level BPE vocabulary of a new encoder."""
    hidden: PositiveInt = 128
    """Width of a new encoder."""
    layers: PositiveInt = 2
    """Layers of a new encoder."""
    heads: PositiveInt | None = None
    """Attention heads of a new encoder; by default width / 64."""


def takes_vectors(classifier: Any) -> bool:
    """Whether a classifier reads the vectors of phase 1."""
    return bool(classifier.vectors and classifier.pretrained is None)


class TrainSettings(TrainStageSettings):
    """Phase 5: the training of the classifier."""

    training: TrainingSettings = TrainingSettings(
        effective_batch=16,
        epochs=3,
        learning_rate=2e-5,
        weight_decay=0.01,
        warmup_steps=0.1,
        schedule="linear",
        clip_norm=1.0,
    )
    """Length, optimizer, batch sizes and precision."""
    classifier: ClassifierSettings = ClassifierSettings()
    """The encoder and its multi-label head."""
    held_out: float = Field(0.05, ge=0, lt=1)
    """Fraction of the labeled documents held out for evaluation."""


class InferSettings(StageSettings):
    """Phase 6: labels of the documents to predict; `published` for the paper's."""

    similarity: float = Field(10.0, ge=0)
    """Weight of the similarity to the class vectors of phase 2, which is added to a probability; 0
    for the classifier alone.
    """
    threshold: float | None = Field(None, gt=0, lt=1)
    """Smallest probability of a predicted label, by the classifier alone; by default, labels end at
    the largest gap, as in phase 2.
    """
    batch_size: Operational[PositiveInt] = 64
    """Texts per forward pass."""
    precision: Arithmetic = "fp32"
    """Arithmetic of the model."""
    block: Operational[PositiveInt] = 1024
    """Documents per task."""
    scores: PositiveInt = 10
    """Most probable classes stored with their probabilities."""

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return the section for ``infer: published``."""
        return PUBLISHED_INFER if given == "published" else given


class TeleclassSettings(Settings):
    """Settings of TELEClass."""

    #: operational: the content of the data is a literal of the units that read it
    data: Operational[TeleclassDataSettings] = TeleclassDataSettings()
    """The taxonomy and the documents."""
    encode: EncodeSettings = EncodeSettings()
    """Phase 1: vectors of documents and classes."""
    refine: RefineSettings = RefineSettings()
    """Phase 2: class vectors and pseudo-labels."""
    augment: AugmentSettings = AugmentSettings()
    """Phase 3: generated documents for starved classes."""
    train: TrainSettings = TrainSettings()
    """Phase 5: the classifier."""
    infer: InferSettings = InferSettings()
    """Phase 6: labels of the documents to predict."""
