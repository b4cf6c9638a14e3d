"""Settings for a phase that is called without its stage, and small taxonomies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments.teleclass.settings import ClassifierSettings, TeleclassSettings
from experiments.teleclass.taxonomy import Row, Taxonomy, make_taxonomy
from raypipe.config.settings import Settings
from raypipe.graph.context import StageContext


def with_sections(context: StageContext, **sections: Settings) -> StageContext:
    """The context with these sections; the others have their defaults."""
    context.__dict__["settings"] = TeleclassSettings().model_copy(update=sections)
    return context


def tokens_of(classifier: ClassifierSettings) -> tuple[str | None, int, int]:
    """The arguments of `make_tokenizer`."""
    return classifier.pretrained, classifier.vocabulary, classifier.length


def taxonomy_of(
    ids: Iterable[str], edges: Iterable[Sequence[str]] = (), keywords: Sequence | None = None
) -> Taxonomy:
    """Classes, whose names are ``name_`` and their ids, below each other."""
    classes = [Row("", id_, f"name_{id_}") for id_ in ids]
    rows = [Row(f"edge {place}", *edge) for place, edge in enumerate(edges)]
    return make_taxonomy(classes, rows, keywords, source="test")
