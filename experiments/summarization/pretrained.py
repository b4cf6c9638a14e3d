"""Pretrained T5 and mT5 by name or directory; nothing is unpickled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.common.pretrained import check_saved_model, load_fast_tokenizer, require_libraries
from experiments.summarization.model import (
    ACTIVATIONS,
    END,
    NORM_EPSILON,
    PAD,
    SIZE_KEYS,
    SPECIAL_TOKENS,
    T5Settings,
    library_config,
    separate_output,
    store_shared_weights_once,
)
from raypipe import ConfigError

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration


def pretrained_settings(name: str) -> T5Settings:
    """The settings of a T5 or mT5 by its name or directory.

    Raises:
        ConfigError: ``transformers`` is missing, there is no such model, or it is another
            architecture.

    """
    _check_place(name)
    from transformers import AutoConfig, PretrainedConfig

    try:
        # as it is stored: some versions of the library change what it says of tied weights
        stored, _ = PretrainedConfig.get_config_dict(name)
        family = stored.get("model_type")
        if family not in ("t5", "mt5"):
            raise ConfigError(f"{name}: is a model of type {family}, neither t5 nor mt5")
        config = AutoConfig.for_model(**stored)
    except OSError as error:
        raise ConfigError(f"{name}: its configuration cannot be read: {error}") from error
    gated = ACTIVATIONS.get(config.feed_forward_proj)
    if gated is None:
        raise ConfigError(
            f"{name}: has the activation {config.feed_forward_proj}; known are "
            f"{' (T5) and '.join(ACTIVATIONS)} (T5 1.1, mT5)"
        )
    fixed = SPECIAL_TOKENS | {"layer_norm_epsilon": NORM_EPSILON}
    for key, value in fixed.items():
        if stored.get(key, value) != value:
            raise ConfigError(f"{name}: has {key} = {stored[key]}; a T5 has {value}")
    # from version 5 of the library on the first key says whether the output is scaled
    tied = stored.get("scale_decoder_outputs", stored.get("tie_word_embeddings", True))
    sizes = {ours: getattr(config, theirs) for ours, theirs in SIZE_KEYS.items()}
    return T5Settings(**sizes, gated=gated, tied=bool(tied) and family == "t5")


def load_pretrained(name: str, settings: T5Settings) -> T5ForConditionalGeneration:
    """Load a T5 or mT5 of these settings; the dropout may be another than it was trained with.

    Raises:
        ConfigError: what :func:`pretrained_settings` raises, the model has other sizes, or its
            safetensors weights are missing.

    """
    stored, wanted = (
        each.model_dump() | {"decoder_layers": each.decoder_depth}
        for each in (pretrained_settings(name), settings)
    )
    for key, found in stored.items():
        if found != wanted[key] and key != "dropout":
            raise ConfigError(f"{name}: has {key} = {found}, not {wanted[key]}")
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = T5Config(**library_config(settings))
    try:
        model = T5ForConditionalGeneration.from_pretrained(
            name, config=config, use_safetensors=True
        )
    except OSError as error:
        raise ConfigError(f"{name}: its weights cannot be read: {error}") from error
    if (model.lm_head.weight is model.shared.weight) != settings.tied:
        if settings.tied:
            raise ConfigError(
                f"{name}: scales its output, but does not share it with the embedding"
            )
        separate_output(model)
    return store_shared_weights_once(model.float().train())


def tokenizer_content(name: str) -> str:
    """The tokenizer of a model, by its name or directory, as JSON of the library ``tokenizers``.

    Raises:
        ConfigError: there is no such tokenizer, or it is not one of a T5.

    """
    _check_place(name)
    loaded = load_fast_tokenizer(name, name)
    if (loaded.pad_token_id, loaded.eos_token_id) != (PAD, END):
        raise ConfigError(
            f"{name}: its tokenizer pads with {loaded.pad_token_id} and ends a text with "
            f"{loaded.eos_token_id}; that of a T5 has {PAD} and {END}"
        )
    content: str = loaded.backend_tokenizer.to_str()
    return content


def _check_place(name: str) -> None:
    require_libraries("summarization", "transformers")
    check_saved_model(name, name)
