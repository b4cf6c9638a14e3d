"""Training task of the language model: mean cross-entropy of each next token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.common.corpora.corpus import CorpusError
from experiments.lm_pretrain.dataset import PackedTokens, RandomTokens, model_of, validation_tokens
from experiments.lm_pretrain.model import DecoderLayer, LanguageModel, LmSettings, flops_per_token
from experiments.lm_pretrain.shards import run_folder
from raypipe.store.run_directory import RunDirectory
from raypipe.training.cross_entropy import linear_cross_entropy
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import Loss, StepContext, TrainTask


class LanguageModelTask(TrainTask):
    """Next-token prediction; a sample is a sequence of ``context + 1`` tokens, int64.

    Both datasets are sent to the workers, so they hold the location of the tokens, not the tokens.
    The evaluation's loss is the logarithm of the perplexity.
    """

    counts = "tokens"

    def __init__(
        self,
        settings: LmSettings,
        data: Dataset[Tensor],
        held_out: Dataset[Tensor] | None = None,
        most_passes: float | None = None,
    ) -> None:
        self.settings = settings
        self.data = data
        self.held_out = held_out
        self.most_passes = most_passes

    def build_model(self) -> LanguageModel:
        """Return the transformer of the settings."""
        return LanguageModel(self.settings)

    def metadata(self) -> Mapping[str, str]:
        """Return the settings of the model."""
        return {"model": self.settings.model_dump_json()}

    def build_dataset(self) -> Dataset[Tensor]:
        """Return the training sequences."""
        return self.data

    def build_eval_dataset(self) -> Dataset[Tensor] | None:
        """Return the sequences that choose the best step, if any."""
        return self.held_out

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """Return the phase of the settings, as far as the passes over the text allow."""
        (phase,) = super().phases(training, effective_batch)
        if self.most_passes is None:
            return [phase]
        most = math.ceil(self.most_passes * len(self.data) / effective_batch)  # type: ignore[arg-type]
        return [replace(phase, steps=min(phase.steps, most))]

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the decoder layers."""
        return [module for module in model.modules() if isinstance(module, DecoderLayer)]

    def flops_per_sample(self, model: nn.Module) -> float:
        """Return the model FLOPs of ``context`` tokens, as :func:`flops_per_token` counts them."""
        del model
        return float(self.settings.context * flops_per_token(self.settings))

    def loss(self, model: LanguageModel, batch: Tensor, context: StepContext) -> Loss:
        """Return the summed cross-entropy, in nats, of ``batch[:, 1:]``, int64 ``[B, L + 1]``."""
        del context
        states, targets = model.states(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        total = linear_cross_entropy(states, model.output, targets)
        return Loss(total=total, weight=targets.numel())


def build_task(settings: Any, run_dir: RunDirectory | None) -> LanguageModelTask:
    """Return the training on a run's tokens; without a run, on random tokens.

    Raises:
        ConfigError: damaged tokens, a text that is too short, or a prompt for the sample that the
            tokenizer cannot encode; reported before the training instead of after it.

    """
    if run_dir is None:
        return random_task(settings.model)
    folder = run_folder(run_dir)
    folder.check()
    folder.tokenizer().encode(settings.sample.prompt)
    model = model_of(folder, settings.model)
    first = {"train": validation_tokens(folder, settings.data.validation_share), "held_out": 0}
    for split, number in folder.index().tokens.items():
        if (number := number - first[split]) <= model.context:
            raise CorpusError(
                f"the {split} text has {number} tokens{_without(first[split])}; a sample needs "
                f"model.context + 1 = {model.context + 1}: give more text or a shorter context"
            )
    train = PackedTokens(folder, "train", model.context, first["train"])
    validation = PackedTokens(folder, "train", model.context, end=first["train"])
    passes = settings.data.most_passes
    return LanguageModelTask(model, train, validation if len(validation) else None, passes)


def _without(validation: int) -> str:
    return f" without the {validation} of data.validation_share" if validation else ""


def build_random_task(settings: Any, run_dir: RunDirectory | None) -> LanguageModelTask:
    """Return the training on the random tokens of the settings."""
    del run_dir
    data = settings.data
    return random_task(settings.model, data.samples, data.held_out, data.seed)


def random_task(
    model: LmSettings, samples: int = 100_000, held_out: int = 256, seed: int = 0
) -> LanguageModelTask:
    """Return a training on random sequences."""
    size = (model.vocabulary, model.context)
    return LanguageModelTask(
        model,
        RandomTokens(*size, samples, seed),
        RandomTokens(*size, held_out, seed, held_out=True),
    )
