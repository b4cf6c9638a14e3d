"""Export of the trained model and its tokenizer to Hugging Face's ``transformers``.

``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` read the directory;
logits and tokens are equal. Writing it does not need ``transformers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from experiments.common.pretrained import save_model
from experiments.lm_pretrain.model import NORM_EPSILON, LmSettings
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.tokenizer import END, END_OF_TEXT, TextTokenizer
from experiments.lm_pretrain.training import model_of
from raypipe import RunDirectory, StageContext, weights

_LLAMA = ("rms", "rotary", "swiglu")
_GPT2 = ("layer", "learned", "gelu")


def check_exportable(settings: LmSettings) -> None:
    """Reject a combination of parts that no architecture of the library has.

    Raises:
        ValueError: names the settings and the allowed combinations.

    """
    if _parts(settings) not in (_LLAMA, _GPT2):
        norm, positions, mlp = _parts(settings)
        raise ValueError(
            f"export: model.norm = {norm}, model.positions = {positions} and model.mlp = {mlp} are "
            "not an architecture of transformers; use rms, rotary and swiglu (LlamaForCausalLM) or "
            "layer, learned and gelu (GPT2LMHeadModel), or leave export out"
        )


def run_export(context: StageContext) -> None:
    """Write the trained model and its tokenizer to ``artifacts/export/hf``."""
    folder = context.run_dir.artifact("export", "hf")
    model = model_of(run_folder(context.run_dir), context.settings.model)
    context.call("export", export, context.run_dir, model, folder)
    context.say(f"for AutoModelForCausalLM.from_pretrained: {folder}")


def export(run_dir: RunDirectory, settings: LmSettings, folder: str) -> None:
    """Write a run's model and tokenizer to a folder of its directory.

    Raises:
        ValueError: see :func:`check_exportable`.
        DamagedError: the tokenizer is missing or damaged.

    """
    check_exportable(settings)
    state, _ = weights.read_weights(run_dir, run_dir.model("train"))
    tensors = {name: part.contiguous() for name, part in renamed(state, settings).items()}
    about = {"bos_token": END, "eos_token": END, "model_max_length": settings.context}
    tokenizer = library_tokenizer(run_folder(run_dir).tokenizer())
    save_model(run_dir, folder, tensors, tokenizer, about, {"config.json": architecture(settings)})


def architecture(settings: LmSettings) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    s = settings
    common = {
        "vocab_size": s.vocabulary,
        "tie_word_embeddings": s.tied,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
    }
    if _parts(s) == _LLAMA:
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": s.width,
            "intermediate_size": s.feed_forward,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.heads,
            "max_position_embeddings": s.context,
            "hidden_act": "silu",
            "rms_norm_eps": NORM_EPSILON,
            # the key up to version 4, and the key from version 5 on
            "rope_theta": s.rope_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_base},
            "attention_bias": False,
            "attention_dropout": s.dropout,
            "mlp_bias": False,
        }
    return common | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": s.width,
        "n_inner": s.feed_forward,
        "n_layer": s.layers,
        "n_head": s.heads,
        "n_positions": s.context,
        "activation_function": "gelu",
        "layer_norm_epsilon": NORM_EPSILON,
        "embd_pdrop": s.dropout,
        "attn_pdrop": s.dropout,
        "resid_pdrop": s.dropout,
    }


def renamed(state: Mapping[str, Tensor], settings: LmSettings) -> dict[str, Tensor]:
    """Return the weights of a model by the library's names."""
    return (_llama if _parts(settings) == _LLAMA else _gpt2)(state, settings.layers)


def library_tokenizer(tokenizer: TextTokenizer) -> Tokenizer:
    """Return a tokenizer of the library ``tokenizers``.

    A tokenizer of characters skips unknown characters there, and rejects them here.
    """
    if tokenizer.kind == "bpe":
        return Tokenizer.from_str(tokenizer.content)
    if tokenizer.kind == "bytes":
        letters = _byte_letters()
        converted = Tokenizer(models.BPE({END: END_OF_TEXT} | {c: b + 1 for b, c in letters}, []))
        converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        converted.decoder = decoders.ByteLevel()
    else:
        places = {character: n for n, character in enumerate(tokenizer.content, start=1)}
        converted = Tokenizer(models.BPE({END: END_OF_TEXT} | places, []))
        converted.decoder = decoders.Fuse()
    converted.add_special_tokens([END])
    return converted


def _parts(settings: LmSettings) -> tuple[str, str, str]:
    return settings.norm, settings.positions, settings.mlp


def _llama(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    renamed_state = {"model.embed_tokens.weight": state["embedding.weight"]}
    for n in range(layers):
        ours, theirs = f"layers.{n}.", f"model.layers.{n}."
        queries, keys, values = state[f"{ours}attention.query_key_value.weight"].chunk(3)
        gate, up = state[f"{ours}feed_forward.up.weight"].chunk(2)
        parts = {
            "input_layernorm": state[f"{ours}norm_attention.weight"],
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": state[f"{ours}attention.out.weight"],
            "post_attention_layernorm": state[f"{ours}norm_feed_forward.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": state[f"{ours}feed_forward.down.weight"],
        }
        renamed_state |= {f"{theirs}{name}.weight": weight for name, weight in parts.items()}
    return renamed_state | {"model.norm.weight": state["norm.weight"]} | _head(state)


def _gpt2(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return GPT-2's weights: its matrices are transposed, and its biases are zero here."""
    renamed_state = {
        "transformer.wte.weight": state["embedding.weight"],
        "transformer.wpe.weight": state["positions.weight"],
    }
    norms = {"transformer.ln_f": state["norm.weight"]}
    matrices = {}
    for n in range(layers):
        ours, theirs = f"layers.{n}.", f"transformer.h.{n}."
        norms[f"{theirs}ln_1"] = state[f"{ours}norm_attention.weight"]
        norms[f"{theirs}ln_2"] = state[f"{ours}norm_feed_forward.weight"]
        matrices[f"{theirs}attn.c_attn"] = state[f"{ours}attention.query_key_value.weight"]
        matrices[f"{theirs}attn.c_proj"] = state[f"{ours}attention.out.weight"]
        matrices[f"{theirs}mlp.c_fc"] = state[f"{ours}feed_forward.up.weight"]
        matrices[f"{theirs}mlp.c_proj"] = state[f"{ours}feed_forward.down.weight"]
    for name, weight in {**norms, **matrices}.items():
        renamed_state[f"{name}.weight"] = weight.T if name in matrices else weight
        renamed_state[f"{name}.bias"] = weight.new_zeros(len(weight))
    return renamed_state | _head(state)


def _head(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the output matrix, unless it is the embedding."""
    return {"lm_head.weight": state["head.weight"]} if "head.weight" in state else {}


def _byte_letters() -> list[tuple[int, str]]:
    """Return each byte with its letter in a byte-level BPE (Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [(byte, chr(byte if byte in printable else next(others))) for byte in range(256)]
