"""Text that the trained model continues from a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.lm_pretrain.evaluation import load_model
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.settings import SampleSettings
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from raypipe.pipeline.context import StageContext
from raypipe.storage.run_directory import RunDirectory


def sample(
    context: StageContext,
    model: LmSettings,
    trial_id: str,
    settings: SampleSettings,
    *,
    on_gpu: bool,
) -> None:
    """A row of ``samples``, and the text to the user."""
    arguments = (context.run_dir, model, trial_id, settings)
    text = context.call("sample", continue_prompt, *arguments, on_gpu=on_gpu)
    context.ledger.put("samples", {"sample": {**settings.model_dump(mode="json"), "text": text}})
    context.say(f"{settings.prompt}{text}")


def continue_prompt(
    run: RunDirectory, model: LmSettings, trial_id: str, settings: SampleSettings
) -> str:
    """Task: what the model writes after the prompt, at most ``settings.tokens`` tokens of it.

    Without a prompt a document is begun.

    Raises:
        ConfigError: the prompt has a character that the tokenizer does not know.

    """
    tokenizer = run_folder(run).tokenizer()
    prompt = tokenizer.encode(settings.prompt).tolist() or [END_OF_TEXT]
    network = load_model(run, model, trial_id)
    return tokenizer.decode(continuation(network, prompt, settings, tokenizer.vocabulary))


@torch.inference_mode()
def continuation(
    model: LanguageModel, prompt: Sequence[int], settings: SampleSettings, vocabulary: int
) -> list[int]:
    """The tokens after a prompt, until the end of the text or ``settings.tokens`` of them.

    The model sees the last ``context`` tokens. With temperature 0 the most probable token comes
    next, else one is drawn, of the ``top_k`` most probable where that is set (Fan et al. 2018,
    Hierarchical neural story generation, section 5.2). Only the first ``vocabulary`` tokens are
    any text.
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
        kept = logits.topk(settings.top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept, logits[kept])
    shares = (logits / settings.temperature).softmax(0)
    return int(torch.multinomial(shares, 1, generator=generator))
