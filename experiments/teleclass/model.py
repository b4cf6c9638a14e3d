"""Classifier: an encoder of token ids, pretrained or new, with one output per class."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.teleclass.settings import ClassifierSettings
from experiments.transformer.model import Transformer, flops_per_sample
from experiments.transformer.settings import TransformerSettings


def transformer_settings(settings: ClassifierSettings, classes: int) -> TransformerSettings:
    """Return the settings of a new transformer encoder."""
    return TransformerSettings(
        vocabulary=settings.vocabulary,
        length=settings.length,
        outputs=max(2, classes),
        hidden=settings.hidden,
        layers=settings.layers,
        heads=settings.heads,
        dropout=settings.dropout,
    )


class ScratchClassifier(nn.Module):
    """A new transformer encoder, plus a linear layer on the text's vector of phase 1, if any.

    The logits of both are added (Cheng et al. 2016, Wide & deep learning).
    """

    def __init__(self, settings: ClassifierSettings, classes: int, width: int) -> None:
        super().__init__()
        self.transformer = Transformer(transformer_settings(settings, classes))
        self.classes = classes
        self.wide = nn.Linear(width, classes, bias=False) if width else None

    def forward(self, tokens: Tensor, lengths: Tensor, vectors: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of ids ``[B, L]``, padded by 0, and unit vectors ``[B, d]``."""
        del lengths
        logits: Tensor = self.transformer(tokens)[:, : self.classes]
        if self.wide is not None:  # scaled to entries around 1
            logits = logits + self.wide(vectors * vectors.shape[1] ** 0.5)
        return logits


class PretrainedClassifier(nn.Module):
    """A BERT-style encoder of ``transformers`` with a linear head on the mean of its states."""

    def __init__(self, encoder: nn.Module, settings: ClassifierSettings, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(settings.dropout)
        self.head = nn.Linear(int(encoder.config.hidden_size), classes)  # type: ignore[union-attr, arg-type]

    def forward(self, tokens: Tensor, lengths: Tensor, vectors: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of the first ``lengths`` ``[B]`` of the ids ``[B, L]``."""
        del vectors
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        states = self.encoder(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def build_classifier(settings: ClassifierSettings, classes: int, width: int) -> nn.Module:
    """Return a classifier to train, with pretrained or new weights.

    ``width`` is the number of dimensions of the vectors that it also reads, or 0.
    """
    if settings.pretrained is None:
        return ScratchClassifier(settings, classes, width)
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    encoder = AutoModel.from_pretrained(settings.pretrained)
    return PretrainedClassifier(_prepared(encoder), settings, classes)


def vocabulary_of(settings: ClassifierSettings) -> int:
    """Return the number of token ids that the classifier knows."""
    if settings.pretrained is None:
        return settings.vocabulary
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(settings.pretrained).vocab_size)


def metadata_of(settings: ClassifierSettings, classes: int, width: int) -> dict[str, str]:
    """Return the metadata from which :func:`restore_classifier` builds the model."""
    about = {"classifier": settings.model_dump_json()}
    about |= {"classes": str(classes), "width": str(width)}
    if settings.pretrained is not None:
        from transformers import AutoConfig

        about["config"] = AutoConfig.from_pretrained(settings.pretrained).to_json_string(False)
    return about


def restore_classifier(weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> nn.Module:
    """Return a trained classifier from weights and metadata alone, in evaluation mode."""
    settings = ClassifierSettings.model_validate_json(metadata["classifier"])
    classes = int(metadata["classes"])
    model: nn.Module
    if "config" not in metadata:
        model = ScratchClassifier(settings, classes, int(metadata["width"]))
    else:
        from transformers import AutoConfig, AutoModel

        config = json.loads(metadata["config"])
        encoder = AutoModel.from_config(AutoConfig.for_model(**config))
        model = PretrainedClassifier(_prepared(encoder), settings, classes)
    model.load_state_dict(dict(weights))
    return model.eval()


def blocks_of(model: nn.Module) -> Iterable[nn.Module]:
    """Return the encoder's layers: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=())


def flops_of(model: Any, settings: ClassifierSettings, classes: int) -> float:
    """Return the floating-point operations of a forward and backward pass at full length.

    They are counted as in :func:`experiments.transformer.model.flops_per_sample`.
    """
    if isinstance(model, ScratchClassifier):
        wide = 0 if model.wide is None else model.wide.weight.numel()
        return float(flops_per_sample(transformer_settings(settings, classes)) + 3 * 2 * wide)
    layers = list(blocks_of(model))
    weights = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2)
    width, length = int(model.encoder.config.hidden_size), settings.length
    return 3.0 * (2 * length * weights + len(layers) * 4 * length**2 * width + 2 * width * classes)


def _prepared(encoder: Any) -> nn.Module:
    """Return an encoder without a pooler, whose missing gradient DDP rejects, in fp32."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    kept: nn.Module = encoder.float()
    return kept
