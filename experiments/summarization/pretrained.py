"""T5 and mT5 as the library ``transformers`` has them: read by name or directory, and written.

T5, T5 1.1 and mT5 have the architecture of :mod:`experiments.summarization.model`; what differs is
the names of the weights. Weights are read from and written to safetensors: nothing is unpickled.
To read takes the extra ``nlp``, to write does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from experiments.summarization.model import END, NORM_EPSILON, PAD, T5, T5Settings
from raypipe.errors import ConfigError
from raypipe.storage.run_directory import RunDirectory

_ACTIVATIONS = {"relu": False, "gated-gelu": True}
#: the names of the sizes in the library
_SIZES = {
    "vocabulary": "vocab_size",
    "width": "d_model",
    "head_width": "d_kv",
    "heads": "num_heads",
    "feed_forward": "d_ff",
    "layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
    "dropout": "dropout_rate",
}
_SPECIAL = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
#: embedding and output, there
_SHARED, _HEAD = "shared.weight", "lm_head.weight"


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
    gated = _ACTIVATIONS.get(config.feed_forward_proj)
    if gated is None:
        raise ConfigError(
            f"{name}: has the activation {config.feed_forward_proj}; known are "
            f"{' (T5) and '.join(_ACTIVATIONS)} (T5 1.1, mT5)"
        )
    fixed = _SPECIAL | {"layer_norm_epsilon": NORM_EPSILON}
    for key, value in fixed.items():
        if stored.get(key, value) != value:
            raise ConfigError(f"{name}: has {key} = {stored[key]}; a T5 has {value}")
    # from version 5 of the library on the first key says whether the output is scaled
    tied = stored.get("scale_decoder_outputs", stored.get("tie_word_embeddings", True))
    sizes = {ours: getattr(config, theirs) for ours, theirs in _SIZES.items()}
    return T5Settings(**sizes, gated=gated, tied=bool(tied) and family == "t5")


def load_pretrained(name: str, model: T5) -> None:
    """Put the weights of a T5 or mT5 into a model of :func:`pretrained_settings`.

    Raises:
        ConfigError: what :func:`pretrained_settings` raises, the model has other sizes, or there
            are no weights as safetensors.

    """
    theirs, ours = pretrained_settings(name), model.settings
    for key in type(ours).model_fields:
        wanted, found = getattr(ours, key), getattr(theirs, key)
        if wanted != found and key not in ("dropout", "decoder_layers"):
            raise ConfigError(f"{name}: has {key} = {found}, not {wanted}")
    if ours.decoder_depth != theirs.decoder_depth:
        raise ConfigError(
            f"{name}: has decoder_layers = {theirs.decoder_depth}, not {ours.decoder_depth}"
        )
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        loaded = AutoModelForSeq2SeqLM.from_pretrained(name, use_safetensors=True)
    except OSError as error:
        raise ConfigError(f"{name}: its weights cannot be read: {error}") from error
    state = loaded.state_dict()
    if ours.tied and not torch.equal(state[_HEAD], state[_SHARED]):
        raise ConfigError(f"{name}: scales its output, but does not share it with the embedding")
    names = weight_names(ours)
    with torch.no_grad():
        for parameter, parts in names.items():
            model.get_parameter(parameter).copy_(torch.cat([state[part] for part in parts]))


def encode(name: str, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts by the tokenizer of a model, without an end.

    Tokens that are no text, like ``</s>``, do not come from a text.

    Raises:
        ConfigError: what :func:`tokenizer_content` raises.

    """
    encoded = _tokenizer(name).encode_batch_fast(list(texts), add_special_tokens=False)
    return [[token for token in each.ids if token not in (PAD, END)] for each in encoded]


def decode(name: str, ids: Iterable[Sequence[int]]) -> list[str]:
    """The texts of tokens, without those that are no text and without white space around.

    Raises:
        ConfigError: what :func:`tokenizer_content` raises.

    """
    return [text.strip() for text in _tokenizer(name).decode_batch([list(each) for each in ids])]


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


def export(model: T5, tokenizer: str, run: RunDirectory, folder: str) -> None:
    """Write a model and its tokenizer to a folder that ``transformers`` reads.

    ``T5ForConditionalGeneration`` has equal logits, and ``AutoTokenizer`` equal tokens, each text
    with its end. The folder is a path of the run's file system, ``tokenizer`` JSON of the library
    ``tokenizers`` in which :data:`PAD` and :data:`END` are tokens.
    """
    s, state = model.settings, model.state_dict()
    tensors: dict[str, Tensor] = {}
    for parameter, parts in weight_names(s).items():
        whole = state[parameter].cpu()
        # a copy: safetensors refuses parts of one memory
        pieces = (piece.clone() for piece in whole.chunk(len(parts)))
        tensors |= dict(zip(parts, pieces, strict=True))
    library = Tokenizer.from_str(tokenizer)
    library.no_padding()
    library.no_truncation()
    pad, end = library.id_to_token(PAD), library.id_to_token(END)
    library.post_processor = TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, END)]
    )
    architecture = {theirs: getattr(s, ours) for ours, theirs in _SIZES.items()}
    architecture |= {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "num_decoder_layers": s.decoder_depth,
        "feed_forward_proj": next(key for key, gated in _ACTIVATIONS.items() if gated == s.gated),
        "tie_word_embeddings": s.tied,
        "layer_norm_epsilon": NORM_EPSILON,
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
        "model.safetensors": save_tensors(tensors, metadata={"format": "pt"}),
        "config.json": _json(architecture | _SPECIAL),
        "generation_config.json": _json(_SPECIAL),
        "tokenizer.json": library.to_str().encode(),
        "tokenizer_config.json": _json(about),
    }
    for name, content in files.items():
        run.write(f"{folder}/{name}", content)


def weight_names(settings: T5Settings) -> dict[str, tuple[str, ...]]:
    """For each of our weights those of the library that it is made of, one below the other."""
    names: dict[str, tuple[str, ...]] = {"embedding": ("shared",)}
    if not settings.tied:
        names["head"] = ("lm_head",)
    up = ("wi_0", "wi_1") if settings.gated else ("wi",)
    depths = {"encoder": settings.layers, "decoder": settings.decoder_depth}
    for stack, depth in depths.items():
        first = f"{stack}.block.0.layer.0.SelfAttention"
        names[f"{stack}_bias"] = (f"{first}.relative_attention_bias",)
        names[f"{stack}_norm"] = (f"{stack}.final_layer_norm",)
        parts = {"attention": "SelfAttention", "cross_attention": "EncDecAttention"}
        if stack == "encoder":
            del parts["cross_attention"]
        for n in range(depth):
            for place, (ours, theirs) in enumerate(parts.items()):
                block = f"{stack}.block.{n}.layer.{place}"
                names[f"{stack}.{n}.norm_{ours}"] = (f"{block}.layer_norm",)
                query, key, value, out = (f"{block}.{theirs}.{part}" for part in "qkvo")
                names[f"{stack}.{n}.{ours}.query"] = (query,)
                names[f"{stack}.{n}.{ours}.key_value"] = (key, value)
                names[f"{stack}.{n}.{ours}.out"] = (out,)
            block = f"{stack}.block.{n}.layer.{len(parts)}"
            dense = f"{block}.DenseReluDense"
            names[f"{stack}.{n}.norm_feed_forward"] = (f"{block}.layer_norm",)
            names[f"{stack}.{n}.feed_forward.up"] = tuple(f"{dense}.{part}" for part in up)
            names[f"{stack}.{n}.feed_forward.down"] = (f"{dense}.wo",)
    return {
        f"{ours}.weight": tuple(f"{part}.weight" for part in theirs)
        for ours, theirs in names.items()
    }


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_content(name))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _check_place(name: str) -> None:
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{name}: to read it takes transformers: pip install 'raypipe-runner[nlp]'"
        )
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{name}: holds no config.json, so it is no saved model")
    elif folder.is_absolute() or name.startswith("."):
        raise ConfigError(f"{name}: there is no such directory")


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
