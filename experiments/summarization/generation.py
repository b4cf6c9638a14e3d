"""Summaries written by a trained model: the most probable token each time, or a beam search."""

from __future__ import annotations

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from experiments.summarization.model import END, PAD, T5, LayerCache
from raypipe.config.settings import Settings


class GenerationSettings(Settings):
    """How a summary is searched for."""

    beams: PositiveInt = Field(1, description="unfinished texts kept in the search; 1: greedy")
    length: PositiveInt = Field(64, description="most tokens written, the end of the text counted")
    length_penalty: float = Field(
        1.0,
        description="a finished text is worth its log-probability by its length to this power, "
        "so above 0 favours long ones; without effect on a greedy search",
    )
    no_repeat_ngram: int = Field(
        0, ge=0, description="so many tokens in a row never come twice; 0: they may"
    )
    batch: PositiveInt = Field(16, description="texts that are summarised at once")


@torch.no_grad()
def generate(
    model: T5, inputs: Tensor, mask: Tensor, settings: GenerationSettings
) -> list[list[int]]:
    """A summary of each text, without the tokens that start, end and pad it.

    ``inputs``, int64 ``[B, S]``, are read where ``mask``, bool ``[B, S]``, is true. With one beam
    the most probable token is written each time, until the end or ``length`` tokens. With more it
    is a beam search as that of the library transformers with ``early_stopping=False``: a step
    takes the best of all continuations; of the first ``beams`` of them those that end are
    finished, and the best that do not end go on, all of them being finished at ``length`` tokens.
    A search ends when ``beams`` texts are finished and the best unfinished one, were it to end
    here, is worth no more than the worst of them. The best finished text is the summary.

    A summary does not depend on the other texts, and what is finished is computed no further.

    Raises:
        ValueError: the model is in training mode, and would drop values.

    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    search = _greedy if settings.beams == 1 else _beam_search
    summaries: list[list[int]] = [[] for _ in inputs]
    # together those of like lengths, and no more padding than they need
    order = mask.sum(1).argsort(descending=True, stable=True)
    for start in range(0, len(order), settings.batch):
        rows = order[start : start + settings.batch]
        used = mask[rows].any(0).nonzero().flatten().tolist() or [0]
        columns = slice(used[0], used[-1] + 1)
        found = search(model, inputs[rows, columns], mask[rows, columns], settings)
        for row, text in zip(rows.tolist(), found, strict=True):
            summaries[row] = text
    return summaries


def _greedy(
    model: T5, inputs: Tensor, mask: Tensor, settings: GenerationSettings
) -> list[list[int]]:
    states, cache = model.encode(inputs, mask), [LayerCache() for _ in model.decoder]
    summaries: list[list[int]] = [[] for _ in inputs]
    rows = torch.arange(len(inputs), device=inputs.device)  # whose texts these are
    texts = inputs.new_full((len(inputs), 1), PAD)
    for length in range(1, settings.length + 1):
        logits = model.decode(texts[:, -1:], states, mask, cache)[:, -1].float()
        tokens = _without_repeats(logits, texts, settings).argmax(-1)
        texts = torch.cat((texts, tokens[:, None]), dim=1)
        going = (tokens != END) & (length < settings.length)
        if going.all():
            continue
        for row, text in zip(rows[~going].tolist(), texts[~going].tolist(), strict=True):
            summaries[row] = _written(text)
        if not going.any():
            break
        rows, texts, states, mask = rows[going], texts[going], states[going], mask[going]
        kept = going.nonzero().flatten()
        for layer in cache:
            layer.select(kept, kept)
    return summaries


def _beam_search(
    model: T5, inputs: Tensor, mask: Tensor, settings: GenerationSettings
) -> list[list[int]]:
    states, cache = model.encode(inputs, mask), [LayerCache() for _ in model.decoder]
    summaries: list[list[int]] = [[] for _ in inputs]
    beams, device = settings.beams, inputs.device
    rows = torch.arange(len(inputs), device=device)
    # B sources with K unfinished texts each, equal ones at first, of which one counts
    texts = inputs.new_full((len(inputs), beams, 1), PAD)
    scores = torch.full((len(inputs), beams), -torch.inf, device=device)
    scores[:, 0] = 0
    # and K finished ones, of which there are none yet
    done = inputs.new_full((len(inputs), beams, 1 + settings.length), PAD)
    worth = torch.full_like(scores, -torch.inf)
    for length in range(1, settings.length + 1):
        flat = texts.flatten(0, 1)
        logits = model.decode(flat[:, -1:], states, mask, cache)[:, -1]
        chances = _without_repeats(logits.float().log_softmax(-1), flat, settings)
        totals = (scores[..., None] + chances.view(*scores.shape, -1)).flatten(1)
        # twice as many as go on, for half of these may end
        best, places = totals.topk(2 * beams)
        tokens, parents = places % chances.shape[-1], places // chances.shape[-1]
        candidates = torch.cat((_take(texts, parents), tokens[..., None]), dim=2)
        ends = (tokens == END) | (length == settings.length)

        values = (best / length**settings.length_penalty).masked_fill(~ends, -torch.inf)
        ended = torch.nn.functional.pad(candidates, (0, settings.length - length), value=PAD)
        worth, chosen = torch.cat((worth, values[:, :beams]), dim=1).topk(beams)
        done = _take(torch.cat((done, ended[:, :beams]), dim=1), chosen)

        scores, chosen = best.masked_fill(ends, -torch.inf).topk(beams)
        texts, parents = _take(candidates, chosen), parents.gather(1, chosen)
        going = scores[:, 0] / length**settings.length_penalty > worth[:, -1]
        for row, text in zip(rows[~going].tolist(), done[~going, 0].tolist(), strict=True):
            summaries[row] = _written(text)
        if not going.any():
            break
        kept = None if going.all() else going.nonzero().flatten()
        source = torch.arange(len(rows), device=device)[:, None] * beams
        own = (source + parents)[going].flatten()
        for layer in cache:
            layer.select(own, kept)
        if kept is not None:
            rows, texts, scores, done, worth = (
                tensor[kept] for tensor in (rows, texts, scores, done, worth)
            )
            states, mask = states[kept], mask[kept]
    return summaries


def _take(texts: Tensor, places: Tensor) -> Tensor:
    """Of texts ``[B, n, t]`` those at places ``[B, m]``."""
    return texts.take_along_dim(places[..., None], dim=1)


def _without_repeats(scores: Tensor, texts: Tensor, settings: GenerationSettings) -> Tensor:
    """Scores ``[N, V]`` of the next token, none for what would repeat tokens of ``[N, t]``."""
    size = settings.no_repeat_ngram
    if not 0 < size <= texts.shape[1]:
        return scores
    ngrams = texts.unfold(1, size, 1)
    last = texts[:, texts.shape[1] + 1 - size :]
    rows, places = (ngrams[..., :-1] == last[:, None]).all(-1).nonzero(as_tuple=True)
    scores = scores.clone()
    scores[rows, ngrams[rows, places, -1]] = -torch.inf
    return scores


def _written(text: list[int]) -> list[int]:
    """The tokens up to the end of a text."""
    end = text.index(END) if END in text else len(text)
    return [token for token in text[:end] if token != PAD]
