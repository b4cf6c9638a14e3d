"""Settings for a phase that is called without its stage."""

from __future__ import annotations

from experiments.teleclass.settings import ClassifierSettings, TeleclassSettings, TrainSettings
from raypipe.config.settings import Settings
from raypipe.graph.context import StageContext


def with_sections(context: StageContext, **sections: Settings) -> StageContext:
    """The context with these sections; the others have their defaults."""
    context.__dict__["settings"] = TeleclassSettings().model_copy(update=sections)
    return context


def train_with(classifier: ClassifierSettings) -> TrainSettings:
    return TrainSettings(classifier=classifier)


def tokens_of(classifier: ClassifierSettings) -> tuple[str | None, int, int]:
    """The arguments of `make_tokenizer`."""
    return classifier.pretrained, classifier.vocabulary, classifier.length
