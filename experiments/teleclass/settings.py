"""The configuration of TELEClass, section by section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from raypipe.config.settings import Settings
from raypipe.hardware import Precision
from raypipe.training.settings import TrainingSettings, TrainStageSettings


class DataSettings(Settings):
    """The taxonomy and the documents: the built-in ones, or files in a folder."""

    source: Literal["builtin", "files"] = Field("builtin", description="built-in corpus, or files")
    dir: Path | None = Field(None, description="the folder of the files")
    labels: str = Field("labels.txt", description="`id<TAB>name` a line")
    hierarchy: str = Field("label_hierarchy.txt", description="`parent id<TAB>child id` a line")
    keywords: str | None = Field(None, description="`name:term,term` a line")
    train: str | None = Field(
        None,
        description="documents, .jsonl, .csv, .parquet or .txt; by default the file train.*",
    )
    test: str | None = Field(
        None, description="documents to predict; by default the file test.*, or the same as train"
    )
    train_labels: str | None = Field(None, description="their gold labels, for measures alone")
    test_labels: str | None = Field(None, description="`id<TAB>label,label` a line")
    text: tuple[str, ...] = Field(
        ("text",), min_length=1, description="columns, joined by newlines"
    )
    id: str = Field("id", description="column of the documents' names")
    gold: str = Field("labels", description="column of the gold labels")
    max_documents: PositiveInt | None = Field(
        None, description="use a sample of so many documents of each file; smaller ones are part"
    )

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _whole(self) -> DataSettings:
        if (self.source == "files") != (self.dir is not None):
            raise ValueError(
                f"source = {self.source} with dir = {self.dir}: files lie in a folder, and the "
                "built-in corpus does not"
            )
        return self


class StageSettings(Settings):
    """Workers of a phase that runs as tasks."""

    workers: PositiveInt | None = Field(
        None, description="tasks at the same time; by default as many as there is room for"
    )
    cpus: PositiveFloat = Field(1, description="CPUs a task, or a share of one")
    gpus: float | None = Field(None, ge=0, description="GPUs a task; 1 where there is one, else 0")
    time_limit_s: PositiveFloat | None = Field(None, description="of an attempt at a task")

    @model_validator(mode="after")
    def _whole_above_one(self) -> Self:
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus or 0)):
            if value > 1 and value != int(value):
                raise ValueError(f"{name} = {value}: above 1 it must be a whole number")
        return self


class EncodeSettings(StageSettings):
    """Phase 1: documents and classes as vectors."""

    model: str | None = Field(
        None,
        description="sentence-transformers model, name or directory; by default TF-IDF and a "
        "truncated SVD (LSA), fitted here",
    )
    max_tokens: PositiveInt = Field(256, description="longest text for the model, the rest is cut")
    batch_size: PositiveInt = Field(64, description="texts a forward of the model")
    precision: Precision = Field("fp32", description="arithmetic of the model")
    dimensions: PositiveInt = Field(256, description="of lsa")
    max_features: PositiveInt = Field(50_000, description="words of lsa")
    fit_documents: PositiveInt = Field(100_000, description="documents that lsa is fitted to")
    seed: int = Field(0, ge=0, lt=2**32, description="of lsa")
    block: PositiveInt = Field(1024, description="documents a task")
    cache: bool = Field(True, description="take and keep vectors in the user's cache, across runs")


class RefineSettings(StageSettings):
    """Phase 2: class vectors from documents, then labels for documents."""

    rounds: int = Field(3, ge=0, description="times that classes become means of documents")
    top_documents: PositiveInt = Field(20, description="documents a class, the most confident")
    confidence: Literal["similarity", "margin"] = Field(
        "similarity", description="of a document in a class, or how far that class is ahead"
    )
    anchor: float = Field(
        0.0, ge=0, description="weight of the description's vector beside the documents' mean"
    )
    rule: Literal["gap", "core", "given"] = Field(
        "gap",
        description="cut at the largest gap of all classes, or of those that a top-down search "
        "reaches; or labels from a file",
    )
    given: str | None = Field(
        None, description="of rule=given, in data.dir: JSON {document id: [class ids]}"
    )
    min_labels: PositiveInt = Field(2, description="labels a document at least; core: 1")
    max_labels: PositiveInt = Field(5, description="labels a document at most; core: 3")
    keep: float = Field(
        1.0, gt=0, le=1, description="share of the documents, the widest gaps; core: 0.75"
    )

    @model_validator(mode="after")
    def _ordered(self) -> RefineSettings:
        if self.min_labels > self.max_labels:
            raise ValueError(
                f"min_labels = {self.min_labels} is above max_labels = {self.max_labels}"
            )
        if (self.rule == "given") != (self.given is not None):
            raise ValueError(f"rule = {self.rule} with given = {self.given}: they go together")
        return self


class AugmentSettings(StageSettings):
    """Phase 3: written documents for starved classes."""

    starved_below: int = Field(10, ge=0, description="a class with fewer documents is starved")
    documents: PositiveInt = Field(5, description="written for each starved class")
    source: Literal["generator", "files", "none"] = Field("generator", description="who writes")
    generator: str = Field(
        "experiments.teleclass.augmentation:from_keywords",
        description="module:function that writes for a class",
    )
    texts: str = Field("generated_docs.txt.gz", description="of source=files: `id<TAB>text` a line")
    labels: str = Field(
        "generated_doc2label.json.gz", description='JSON {id: {"core_classes": class id}}'
    )
    seed: int = Field(0, ge=0, lt=2**32, description="of the generator")


class ClassifierSettings(Settings):
    """The encoder with a head of an output a class."""

    pretrained: str | None = Field(
        None, description="BERT-style model, name or directory; by default one from scratch"
    )
    length: PositiveInt = Field(128, description="tokens of a text, the rest is cut")
    dropout: float = Field(0.1, ge=0, lt=1, description="before the head, and from scratch inside")
    pooling: Literal["mean", "cls"] = Field("mean", description="of a pretrained model's states")
    vectors: bool = Field(
        True, description="from scratch: the text's vector of phase 1 is an input beside the tokens"
    )
    vocabulary: int = Field(8000, ge=512, description="from scratch: tokens of its byte-level BPE")
    hidden: PositiveInt = Field(128, description="from scratch: width")
    layers: PositiveInt = Field(2, description="from scratch: layers")
    heads: PositiveInt | None = Field(None, description="from scratch: by default width / 64")

    @property
    def takes_vectors(self) -> bool:
        """Whether the vectors of phase 1 are an input."""
        return self.vectors and self.pretrained is None


class TrainSettings(TrainStageSettings):
    """Phase 5: the classifier, on the training core."""

    training: TrainingSettings = TrainingSettings(
        effective_batch=16,
        epochs=3,
        learning_rate=2e-5,
        weight_decay=0.01,
        warmup_steps=0.1,
        schedule="linear",
        clip_norm=1.0,
    )
    classifier: ClassifierSettings = ClassifierSettings()
    held_out: float = Field(
        0.05, ge=0, lt=1, description="share of the labelled documents that is evaluated on"
    )


class InferSettings(StageSettings):
    """Phase 6: labels for the test documents."""

    threshold: float | None = Field(0.5, gt=0, lt=1, description="least probability of a label")
    top_k: PositiveInt | None = Field(None, description="or so many labels, the most probable")
    batch_size: PositiveInt = Field(64, description="texts a forward")
    precision: Precision = Field("fp32", description="arithmetic of the model")
    block: PositiveInt = Field(1024, description="documents a task")
    scores: PositiveInt = Field(10, description="most probable classes written beside")

    @model_validator(mode="after")
    def _one_rule(self) -> InferSettings:
        if (self.threshold is None) == (self.top_k is None):
            raise ValueError(
                f"threshold = {self.threshold} with top_k = {self.top_k}: give one, and null "
                "for the other"
            )
        return self


class TeleclassSettings(Settings):
    """TELEClass: labels of a taxonomy for texts that nobody has labelled."""

    data: DataSettings = DataSettings()
    encode: EncodeSettings = EncodeSettings()
    refine: RefineSettings = RefineSettings()
    augment: AugmentSettings = AugmentSettings()
    train: TrainSettings = TrainSettings()
    infer: InferSettings = InferSettings()
