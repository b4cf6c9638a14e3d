"""Generation of summaries: greedy, or by the beam search of ``transformers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveInt

from experiments.summarization.model import END, PAD, SPECIAL_TOKENS
from raypipe import Operational, Settings

if TYPE_CHECKING:
    from torch import Tensor


class GenerationSettings(Settings):
    """Search for a summary, greedy or with several beams."""

    beams: PositiveInt = 1
    """Beams of the search; 1 is a greedy search."""
    length: PositiveInt = 64
    """Longest summary in tokens, the end token included."""
    length_penalty: float = 1.0
    """Exponent of the length that divides a finished text's log-probability: above 0 it favors long
    texts. No effect on a greedy search.
    """
    no_repeat_ngram: int = Field(0, ge=0)
    """Length of token sequences that are never repeated; 0 allows all."""
    batch: Operational[PositiveInt] = 16
    """Documents per forward pass."""


def generate(
    model: Any, inputs: Tensor, mask: Tensor, settings: GenerationSettings
) -> list[list[int]]:
    """Return a summary of each text, without the tokens that start, end and pad it.

    A beam search ends when ``beams`` texts are finished and the best unfinished one, were it to
    end here, is worth no more than the worst of them.

    Args:
        model: a ``T5ForConditionalGeneration``, in evaluation mode.
        inputs: the sources, int64 ``[B, S]``.
        mask: where the sources are read, bool ``[B, S]``.
        settings: the search.

    Raises:
        ValueError: the model is in training mode, and would drop values.

    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

    beam_search = {"length_penalty": settings.length_penalty, "early_stopping": False}
    how = GenerationConfig(
        num_beams=settings.beams,
        max_new_tokens=settings.length,
        no_repeat_ngram_size=settings.no_repeat_ngram,
        do_sample=False,
        **(beam_search if settings.beams > 1 else {}),
        **SPECIAL_TOKENS,
    )
    summaries: list[list[int]] = [[] for _ in inputs]
    # texts of similar lengths together, with as little padding as possible
    order = mask.sum(1).argsort(descending=True, stable=True)
    for start in range(0, len(order), settings.batch):
        rows = order[start : start + settings.batch]
        used = mask[rows].any(0).nonzero().flatten().tolist() or [0]
        columns = slice(used[0], used[-1] + 1)
        # the default cache has as many layers as the encoder; a decoder may have more
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        # All beams of a text share the keys and values of its source. Reordering those, too,
        # would copy them in every step: half of the time of a search with T5-small.
        cache.reorder_cache = (  # type: ignore[method-assign]
            cache.self_attention_cache.reorder_cache
        )
        written = model.generate(
            input_ids=inputs[rows, columns],
            attention_mask=mask[rows, columns].long(),
            generation_config=how,
            past_key_values=cache,
        )
        for row, text in zip(rows.tolist(), written.tolist(), strict=True):
            summaries[row] = [token for token in text if token not in (PAD, END)]
    return summaries
