"""Corpus: the taxonomy with its documents, from files or built in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from experiments.common.corpora.corpus import CorpusError
from experiments.teleclass.data.builtin import builtin_documents
from experiments.teleclass.data.documents import Documents, read_documents
from experiments.teleclass.data.taxonomy import Taxonomy, read_taxonomy
from experiments.teleclass.settings import TeleclassDataSettings

_FORMS = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz", ".txt", ".txt.gz")


@dataclass(frozen=True)
class LabeledCorpus:
    """A taxonomy, training documents, and documents to predict (None for the training ones)."""

    taxonomy: Taxonomy
    train: Documents
    test: Documents | None

    def documents(self, name: str) -> Documents:
        """Return the documents ``train`` or ``test``."""
        return self.test if name == "test" and self.test is not None else self.train

    @property
    def predicted(self) -> str:
        """The name of the documents that are predicted."""
        return "train" if self.test is None else "test"

    def identity(self) -> dict[str, str]:
        """Return the fingerprints of the content of the files, never their paths."""
        about = {"taxonomy": self.taxonomy.fingerprint, "train": self.train.fingerprint}
        return about if self.test is None else {**about, "test": self.test.fingerprint}


@lru_cache(maxsize=1)  # a sweep builds the stages of every trial
def load(settings: TeleclassDataSettings) -> LabeledCorpus:
    """Return the corpus of the settings.

    Raises:
        CorpusError: a file is missing or cannot be used.

    """
    if settings.dir is None:
        return LabeledCorpus(*builtin_documents(settings.max_documents))
    folder = settings.dir
    keywords = None if settings.keywords is None else folder / settings.keywords
    taxonomy = read_taxonomy(folder / settings.labels, folder / settings.hierarchy, keywords)

    def documents(path: Path, gold: str | None) -> Documents:
        return read_documents(
            path,
            taxonomy,
            columns=settings.text,
            id_column=settings.id,
            labels_column=settings.gold,
            labels=None if gold is None else folder / gold,
            max_documents=settings.max_documents,
        )

    train = _file(folder, "train", settings.train)
    if train is None:
        raise CorpusError(
            f"{folder}: there is no file train with one of {', '.join(_FORMS)}; "
            "name the documents in data.train"
        )
    test = _file(folder, "test", settings.test)
    return LabeledCorpus(
        taxonomy,
        documents(train, settings.train_labels),
        None if test is None else documents(test, settings.test_labels),
    )


def _file(folder: Path, name: str, given: str | None) -> Path | None:
    """Return the given file, or the one with the default name if it exists."""
    if given is not None:
        return folder / given
    return next((p for form in _FORMS if (p := folder / f"{name}{form}").is_file()), None)
