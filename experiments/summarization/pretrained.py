"""Pretrained T5 and mT5 by name or directory, and export to such a directory.

Weights are read from and written to safetensors: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.summarization.model import (
    ACTIVATIONS,
    END,
    NORM_EPSILON,
    PAD,
    SIZE_KEYS,
    SPECIAL_TOKENS,
    T5Settings,
    library_config,
    require_transformers,
    separate_output,
    store_shared_weights_once,
)
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory

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
        ConfigError: ``transformers`` is missing, there is no such tokenizer, or it is not one of a
            T5.

    """
    _check_place(name)
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{name}: its tokenizer cannot be read: {error}") from error
    # of a folder without a tokenizer the library makes one that knows the white space alone
    if not loaded.is_fast or len(loaded) <= len(loaded.all_special_tokens) + 1:
        raise ConfigError(f"{name}: has no tokenizer; take a model with a tokenizer.json")
    if (loaded.pad_token_id, loaded.eos_token_id) != (PAD, END):
        raise ConfigError(
            f"{name}: its tokenizer pads with {loaded.pad_token_id} and ends a text with "
            f"{loaded.eos_token_id}; that of a T5 has {PAD} and {END}"
        )
    content: str = loaded.backend_tokenizer.to_str()
    return content


def export(
    model: T5ForConditionalGeneration,
    settings: T5Settings,
    tokenizer: str,
    run: RunDirectory,
    folder: str,
) -> None:
    """Write a model and its tokenizer to a folder that ``transformers`` reads.

    ``T5ForConditionalGeneration`` has equal logits, and ``AutoTokenizer`` equal tokens, each text
    with its end. The folder is a path of the run's file system, ``tokenizer`` JSON of the library
    ``tokenizers`` in which :data:`PAD` and :data:`END` are tokens.
    """
    from safetensors.torch import save
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    library = Tokenizer.from_str(tokenizer)
    library.no_padding()
    library.no_truncation()
    pad, end = library.id_to_token(PAD), library.id_to_token(END)
    library.post_processor = TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, END)]
    )
    architecture = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        **library_config(settings),
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        # an end of a text that is spelled out in a text is text
        "split_special_tokens": True,
    }
    files = {
        "model.safetensors": save(model.cpu().state_dict(), metadata={"format": "pt"}),
        "config.json": _json(architecture),
        "generation_config.json": _json(SPECIAL_TOKENS),
        "tokenizer.json": library.to_str().encode(),
        "tokenizer_config.json": _json(about),
    }
    for name, content in files.items():
        run.write(f"{folder}/{name}", content)


def _check_place(name: str) -> None:
    require_transformers()
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{name}: holds no config.json, so it is not a saved model")
    elif folder.is_absolute() or name.startswith("."):
        raise ConfigError(f"{name}: there is no such directory")


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
