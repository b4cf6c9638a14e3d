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
from experiments.lm_pretrain.model import NORM_EPSILON, ROPE_BASE, LmSettings
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.tokenizer import END, END_OF_TEXT, TextTokenizer
from experiments.lm_pretrain.training import model_of
from raypipe import RunDirectory, StageContext, weights


def run_export(context: StageContext) -> None:
    """Write the trained model and its tokenizer to ``artifacts/export/hf``."""
    folder = context.run_dir.artifact("export", "hf")
    model = model_of(run_folder(context.run_dir), context.settings.model)
    context.call("export", export, context.run_dir, model, folder)
    context.say(f"for AutoModelForCausalLM.from_pretrained: {folder}")


def export(run_dir: RunDirectory, settings: LmSettings, folder: str) -> None:
    """Write a run's model and tokenizer to a folder of its directory.

    Raises:
        DamagedError: the tokenizer is missing or damaged.

    """
    state, _ = weights.read_weights(run_dir, run_dir.model("train"))
    tensors = {name: part.contiguous() for name, part in renamed(state, settings.layers).items()}
    about = {"bos_token": END, "eos_token": END, "model_max_length": settings.context}
    tokenizer = library_tokenizer(run_folder(run_dir).tokenizer())
    save_model(run_dir, folder, tensors, tokenizer, about, {"config.json": architecture(settings)})


def architecture(settings: LmSettings) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    s = settings
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocabulary,
        "tie_word_embeddings": s.tied,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "hidden_size": s.width,
        "intermediate_size": s.feed_forward,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.heads,
        "max_position_embeddings": s.context,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        # the key up to version 4, and the key from version 5 on
        "rope_theta": ROPE_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "attention_bias": False,
        "attention_dropout": s.dropout,
        "mlp_bias": False,
    }


def renamed(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the weights of a model by the library's names."""
    names = {"model.embed_tokens": state["embedding.weight"], "model.norm": state["norm.weight"]}
    if "head.weight" in state:  # otherwise it is the embedding
        names["lm_head"] = state["head.weight"]
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
        names |= {f"{theirs}{name}": weight for name, weight in parts.items()}
    return {f"{name}.weight": weight for name, weight in names.items()}


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


def _byte_letters() -> list[tuple[int, str]]:
    """Return each byte with its letter in a byte-level BPE (Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [(byte, chr(byte if byte in printable else next(others))) for byte in range(256)]
