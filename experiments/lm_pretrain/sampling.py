"""Continuation of a prompt by the trained model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.common.evaluation import task_arithmetic
from experiments.lm_pretrain.evaluation import load_model
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.settings import SampleSettings
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from experiments.lm_pretrain.training import model_of
from raypipe import RunDirectory, StageContext, precision


def run_sample(context: StageContext) -> None:
    """Continue the prompt; record and show the text."""
    settings: SampleSettings = context.settings.sample
    model = model_of(run_folder(context.run_dir), context.settings.model)
    arguments = (context.run_dir, model, settings, context.settings.train.training.precision)
    text = context.call("sample", continue_prompt, *arguments, on_gpu=context.stage.on_gpu)
    context.ledger.put("samples", {"sample": {**settings.model_dump(mode="json"), "text": text}})
    context.say(f"{settings.prompt}{text}")


def continue_prompt(
    run_dir: RunDirectory,
    model: LmSettings,
    settings: SampleSettings,
    arithmetic: precision.Precision,
) -> str:
    """Return the model's continuation of the prompt; an empty prompt begins a document.

    Raises:
        ConfigError: the tokenizer does not know a character of the prompt.

    """
    tokenizer = run_folder(run_dir).tokenizer()
    prompt = tokenizer.encode(settings.prompt).tolist() or [END_OF_TEXT]
    network = load_model(run_dir, model)
    with task_arithmetic(arithmetic):
        return tokenizer.decode(continuation(network, prompt, settings, tokenizer.vocabulary))


@torch.inference_mode()
def continuation(
    model: LanguageModel, prompt: Sequence[int], settings: SampleSettings, vocabulary: int
) -> list[int]:
    """Return the tokens after a prompt, up to an end of text or ``settings.tokens`` tokens.

    The model sees the last ``context`` tokens. With temperature 0 the most probable token comes
    next; otherwise one is drawn, from the ``top_k`` most probable tokens if that is set (Fan et
    al. 2018, Hierarchical neural story generation, section 5.2). Only the first ``vocabulary``
    tokens have a text.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    device = model.embedding.weight.device
    tokens = list(prompt)
    while len(tokens) < len(prompt) + settings.tokens:
        seen = torch.tensor([tokens[-model.context :]], device=device)
        chosen = _next(model(seen)[0, -1, :vocabulary].double().cpu(), settings, generator)
        if chosen == END_OF_TEXT:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


def _next(logits: Tensor, settings: SampleSettings, generator: torch.Generator) -> int:
    if settings.temperature == 0:
        return int(logits.argmax())
    if settings.top_k is not None and settings.top_k < len(logits):
        best = logits.topk(settings.top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(0, best, logits[best])
    shares = (logits / settings.temperature).softmax(0)
    return int(torch.multinomial(shares, 1, generator=generator))
