"""Corpora from text: tokenized by scikit-learn, empty documents dropped and counted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import PositiveInt, field_validator
from sklearn.feature_extraction.text import CountVectorizer

from experiments.common.corpora.corpus import Corpus, CorpusError, make_corpus
from experiments.common.corpora.files import check_name, find_file, open_text, read_rows, reading
from raypipe import Settings

#: At least three letters in a row: parts of identifiers are words, numbers are not.
WORD_PATTERN = r"[^\W\d_]{3,}"

#: documents whose letters outside all words are counted
_SAMPLE = 1000


class Tokenization(Settings):
    """Selection of the vocabulary."""

    max_features: PositiveInt = 5000
    """Maximum number of words, the most frequent first, ties in alphabetical order."""
    min_df: int | float = 5
    """Minimum number, or fraction, of documents that contain a word."""
    max_df: int | float = 0.5
    """Maximum number, or fraction, of documents that contain a word."""
    stop_words: Literal["english"] | None = "english"
    """scikit-learn's English list, or none."""
    word_pattern: str = WORD_PATTERN
    """Regular expression of a word; by default three letters or more in a row."""

    @field_validator("word_pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from error
        if groups > 1:
            raise ValueError(f"it has {groups} groups; allowed is one: write others as (?:...)")
        return pattern


def load_text(directory: Path, name: str, tokenization: Tokenization | None = None) -> Corpus:
    """Return the corpus in a text file or a folder of text files.

    ``directory/<name>.txt`` or ``.txt.gz`` holds one document per line. In the folder
    ``directory/<name>``, each ``.txt`` file, subfolders included, is a document.

    Raises:
        CorpusError: neither exists, the bytes are not UTF-8, or no word is left.

    """
    check_name(name)
    folder = directory / name
    if name and folder.is_dir():
        return vectorize(name, _folder_texts(folder), str(folder), tokenization)
    path = find_file(directory, name, [("", ".txt"), ("", ".txt.gz")])
    return vectorize(name, _line_texts(path), str(path), tokenization)


def load_table(
    directory: Path,
    name: str,
    form: Literal["jsonl", "csv", "parquet"],
    column: str = "text",
    tokenization: Tokenization | None = None,
) -> Corpus:
    """Return the corpus in one column of ``directory/<name>.<form>``, one document per row.

    JSONL and CSV may be ``.gz``. A missing value is an empty document.

    Raises:
        CorpusError: the file or column does not exist (the message lists those that do), the file
            is damaged, values are not text, or no word is left.

    """
    forms = [("", f".{form}")] if form == "parquet" else [("", f".{form}"), ("", f".{form}.gz")]
    path = find_file(directory, name, forms)
    texts = read_rows(path, texts=[column])[column].fill_null("").to_pylist()
    return vectorize(name, texts, str(path), tokenization)


def vectorize(
    name: str, texts: Iterable[str], source: str, tokenization: Tokenization | None = None
) -> Corpus:
    """Count the words of texts; documents without a word of the vocabulary are dropped.

    Args:
        name: the name in results.
        texts: the documents, read once.
        source: the origin for error messages.
        tokenization: the definition of a word.

    Raises:
        CorpusError: no word is left, or scikit-learn rejects the settings.

    """
    settings = tokenization or Tokenization()
    vectorizer = CountVectorizer(
        token_pattern=settings.word_pattern,
        min_df=settings.min_df,
        max_df=settings.max_df,
        stop_words=settings.stop_words,
        dtype=np.int64,
    )
    sample = ["not read yet"]
    try:
        texts = iter(texts)
        sample = list(islice(texts, _SAMPLE))
        counts = vectorizer.fit_transform(chain(sample, texts))
    except CorpusError:
        raise
    except ValueError as error:
        if not any(text.strip() for text in sample):
            reason = f"{source}: no documents: every line or file is empty"
            raise CorpusError(reason) from error
        raise CorpusError(
            f"{source}: no word is left with min_df={settings.min_df}, max_df={settings.max_df}, "
            f"stop_words={settings.stop_words!r} and word_pattern={settings.word_pattern!r} "
            f"({error}); lower min_df, raise max_df or give more documents"
        ) from error
    # Not CountVectorizer's own limit, which breaks ties depending on the processor.
    totals = np.asarray(counts.sum(axis=0)).ravel()
    kept = np.sort(np.argsort(-totals, kind="stable")[: settings.max_features])
    counts = counts[:, kept]
    filled = np.diff(counts.indptr) > 0
    return make_corpus(
        name,
        counts[filled],
        source=source,
        vocabulary=[str(word) for word in vectorizer.get_feature_names_out()[kept]],
        dropped_documents=int((~filled).sum()),
        skipped_letters=_skipped(sample, settings.word_pattern),
    )


def _skipped(texts: Iterable[str], word_pattern: str) -> float:
    """Return the share of the letters of texts that belong to no word."""
    token, letters, skipped = re.compile(word_pattern), 0, 0
    for text in texts:
        lower = text.lower()  # as CountVectorizer sees it
        letters += sum(map(str.isalpha, lower))
        skipped += sum(map(str.isalpha, token.sub("", lower)))
    return skipped / letters if letters else 0.0


def _folder_texts(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.txt")):
        with reading(path, "UTF-8 text"), open_text(path) as file:
            text = file.read()
        yield text


def _line_texts(path: Path) -> Iterator[str]:
    with reading(path, "UTF-8 text, a document a line"), open_text(path) as file:
        yield from file
