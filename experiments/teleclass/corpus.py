"""The taxonomy with its documents, from files or built in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from experiments.teleclass.builtin import builtin_documents
from experiments.teleclass.documents import Documents, read_documents
from experiments.teleclass.settings import DataSettings
from experiments.teleclass.taxonomy import Taxonomy, read_taxonomy


@dataclass(frozen=True)
class Corpus:
    """A taxonomy, documents to learn from, and documents to predict (None: the same)."""

    taxonomy: Taxonomy
    train: Documents
    test: Documents | None

    def documents(self, name: str) -> Documents:
        """The documents ``train`` or ``test``."""
        return self.test if name == "test" and self.test is not None else self.train

    @property
    def predicted(self) -> str:
        """The name of the documents that are predicted."""
        return "train" if self.test is None else "test"

    def identity(self) -> dict[str, str]:
        """What decides results: the content of the files, and never their paths."""
        about = {"taxonomy": self.taxonomy.fingerprint, "train": self.train.fingerprint}
        return about if self.test is None else {**about, "test": self.test.fingerprint}


@lru_cache(maxsize=1)  # a sweep asks for the stages of each of its trials
def load(settings: DataSettings) -> Corpus:
    """The corpus of the settings.

    Raises:
        CorpusError: a file that is missing or cannot be used.

    """
    if settings.source == "builtin" or settings.dir is None or settings.train is None:
        return Corpus(*builtin_documents(settings.max_documents))
    folder = settings.dir
    keywords = None if settings.keywords is None else folder / settings.keywords
    taxonomy = read_taxonomy(folder / settings.labels, folder / settings.hierarchy, keywords)

    def documents(name: str, gold: str | None) -> Documents:
        labels: Path | None = None if gold is None else folder / gold
        return read_documents(
            folder / name,
            taxonomy,
            columns=settings.text,
            id_column=settings.id,
            labels_column=settings.gold,
            labels=labels,
            max_documents=settings.max_documents,
        )

    learnt = documents(settings.train, settings.train_labels)
    predicted = None if settings.test is None else documents(settings.test, settings.test_labels)
    return Corpus(taxonomy, learnt, predicted)
