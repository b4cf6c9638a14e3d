"""Entry point to all corpora."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from experiments.common.corpora.bow import load_bow, load_uci
from experiments.common.corpora.builtin import NAME, builtin_corpus
from experiments.common.corpora.corpus import Corpus, CorpusError
from experiments.common.corpora.files import check_known
from experiments.common.corpora.text import WORD_PATTERN, Tokenization, load_table, load_text
from raypipe.config.settings import Settings

Source = Literal["builtin", "bow", "uci", "text", "jsonl", "csv", "parquet"]

_TOKENIZATION = tuple(field.name for field in fields(Tokenization))


class _SourceSettings(Settings):
    """Settings of all sources together; each source checks its part."""

    max_documents: int | None = None
    split: Literal["train", "val"] = "val"
    column: str = "text"
    max_features: int = 1
    min_df: int | float = 1
    max_df: int | float = 1
    stop_words: Literal["english"] | None = None
    word_pattern: str = WORD_PATTERN


def load_corpus(
    source: Source, name: str, directory: Path | None = None, **settings: Any
) -> Corpus:
    """Load one corpus.

    Args:
        source: ``builtin`` (its only name is ``stdlib``); ``bow`` for
            ``X_<name>_<split>_bow.npz``; ``uci`` for ``docword``/``vocab``; ``text`` for a file
            with one document per line or a folder of files; ``jsonl``, ``csv``, ``parquet`` for a
            column.
        name: the corpus.
        directory: the folder of the files; not used by ``builtin``.
        settings: ``max_documents`` (builtin); ``split`` (bow); ``column`` (tables); the fields of
            :class:`Tokenization` (all but bow and uci).

    Raises:
        CorpusError: the source, the name or a setting is unknown, the folder is missing, or the
            source's reader raises.

    """
    check_known("source", source, get_args(Source), "data.source")
    own = {"builtin": ("max_documents",), "bow": ("split",), "uci": (), "text": ()}
    allowed = own.get(source, ("column",))
    if source not in ("bow", "uci"):
        allowed += _TOKENIZATION
    for key in settings:
        check_known("option", key, allowed, f"data.options of data.source={source}")
    try:
        settings = _SourceSettings.model_validate(settings).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:1]))
        raise CorpusError(
            f"data.options.{place} = {first['input']!r}: {first['msg'].lower()} "
            f"(data.source={source})"
        ) from error
    words = Tokenization(**{k: settings.pop(k) for k in _TOKENIZATION if k in settings})
    if source == "builtin":
        check_known("corpus", name, [NAME], "data.source=builtin")
        return builtin_corpus(tokenization=words, **settings)
    if directory is None:
        raise CorpusError(f"data.source={source} reads files: set data.dir to their folder")
    if source == "bow":
        return load_bow(directory, name, **settings)
    if source == "uci":
        return load_uci(directory, name)
    if source == "text":
        return load_text(directory, name, words)
    return load_table(directory, name, source, tokenization=words, **settings)
